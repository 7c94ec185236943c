"""What telemetry adds to a step: to its appends and attention, and to the whole of it.

A decode step of many sequences and a prefill chunk of one, of Llama-3.1-8B's shape.
Appends and attention are timed without the model, so that what telemetry costs is a
difference of two times that are not much larger than itself; the whole step by the
wall too, in a running loop. Steps without and with telemetry take
turns, since a device's clocks drift.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from benchmarks import llama_step, turn
from benchmarks.llama_step import StepShape
from benchmarks.rows import implementations, spread
from benchmarks.timing import Times, device_times, steady_times

# Rounds in which both kinds of step are timed, and samples of each in a round.
ROUNDS, REPEATS = 5, 8

type Row = dict[str, Any]
type Step = Callable[..., tuple[Any, fp8kv.PagedKVCache, fp8kv.CalibrationState]]


def run(small: bool) -> Iterator[Row]:
    """Times steps without and with telemetry.

    Args:
      small: one small layer, for a machine without a GPU.

    Yields:
      Two rows per shape and clock; the second has its ratio to the first.
    """
    model = llama_step.llama_config()
    decode = StepShape(model=model, num_seqs=32, seq_len=4096)
    chunk = StepShape(model=model, num_seqs=1, seq_len=2048)
    if small:
        model = llama_step.llama_config(
            num_layers=1,
            hidden_size=256,
            num_q_heads=4,
            num_kv_heads=2,
            intermediate_size=512,
            vocab_size=1000,
        )
        decode = StepShape(model=model, num_seqs=2, seq_len=256)
        chunk = StepShape(model=model, num_seqs=1, seq_len=256)
    forward, params = llama_step.abstract_params(model)
    make = fp8kv.make_steps(forward).prefill_step

    def whole(cache, state, batch, params):
        return make(params, cache, state, batch)

    heads = (model.num_q_heads, model.num_kv_heads, model.num_kv_heads)

    def attended(shape: StepShape, num_queries: int) -> tuple[Any, ...]:
        return _batch(shape, num_queries), *_rows(shape, num_queries, heads)

    sizes = (decode, 1), (chunk, chunk.seq_len)
    lowered = []
    for size in sizes:
        batch, *rows = jax.eval_shape(functools.partial(attended, *size))
        args = (batch, *rows)
        lowered += (
            _lower(_append_and_attend, args, *size),
            _lower(whole, (batch, params), *size),
        )
    compiled = itertools.batched(turn.compile_all(lowered), 2)
    _, params = llama_step.random_params(model)
    for (shape, num_queries), (attend, step) in zip(sizes, compiled, strict=True):
        case = f"{shape.num_seqs}x{num_queries} tokens of {shape.seq_len}"
        args = attended(shape, num_queries)
        pair = _pair(attend, args, shape)
        yield from _compared("append, attention", case, pair)
        del pair
        pair = _pair(step, (args[0], params), shape)
        yield from _compared("whole step", case, pair)
        yield from _compared("whole step", case, pair, wall=True)
        del pair, args


def _append_and_attend(cache, state, batch, q, k, v):
    step = fp8kv.begin_step(cache, state, batch)
    outs = []
    for layer in range(len(q)):
        out, step = fp8kv.attend(step, layer, q[layer], k[layer], v[layer])
        outs.append(out)
    return outs, *fp8kv.end_step(step)


class _Chain:
    """A compiled step that hands its cache and its state, scales frozen, to the next."""

    def __init__(self, step: Step, args: Any, shape: StepShape, telemetry: bool):
        self.step, self.args = step, args
        self.cache = llama_step.full_cache(shape)
        self.state = _state(shape, args[0].token_ids.size, telemetry)

    def __call__(self) -> Any:
        out, self.cache, self.state = self.step(self.cache, self.state, *self.args)
        return out


def _state(
    shape: StepShape, num_tokens: int, telemetry: bool
) -> fp8kv.CalibrationState:
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(window_tokens=1),
        shape.cache,
        max_tokens_per_step=num_tokens,
        telemetry=telemetry,
    )
    # As `release_window` leaves it, which cannot be traced.
    return replace(state, frozen=jnp.array(True), staged=None)


def _lower(
    step: Step, args: Any, shape: StepShape, num_queries: int
) -> list[jax.stages.Lowered]:
    """Lowers a step without and with telemetry."""

    def held(telemetry: bool) -> tuple[Any, ...]:
        num_tokens = shape.num_seqs * num_queries
        return llama_step.full_cache(shape), _state(shape, num_tokens, telemetry)

    return [
        turn.lower(step, *jax.eval_shape(lambda on=on: held(on)), *args, donate=(0, 1))
        for on in (False, True)
    ]


def _pair(steps: list[Step], args: Any, shape: StepShape) -> list[_Chain]:
    """Makes what a step without and one with telemetry hand on."""
    on = False, True
    return [_Chain(step, args, shape, t) for step, t in zip(steps, on, strict=True)]


def _compared(
    op: str, case: str, pair: list[_Chain], *, wall: bool = False
) -> Iterator[Row]:
    """Times both in turn: on the device, or by the wall in a running loop."""
    samples: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for chain, times in zip(pair, samples, strict=True):
            if wall:
                timed = steady_times(chain, repeats=REPEATS)
            else:
                timed = device_times([chain], repeats=REPEATS)
            times.append(timed.median)
    clock = "wall" if wall else "device"
    without, with_telemetry = (Times.of(times) for times in samples)
    names = {"op": op, "implementation": implementations()[0]}
    yield names | {"case": f"{case} {clock}"} | spread(without, clock)
    ratio = {"over_plain": with_telemetry.median / without.median}
    case = f"{case} {clock}, telemetry"
    yield names | {"case": case} | spread(with_telemetry, clock) | ratio


def _batch(shape: StepShape, num_queries: int) -> fp8kv.Batch:
    """Makes the newest tokens of each sequence."""
    num_seqs, seq_len = shape.num_seqs, shape.seq_len
    page_size = llama_step.PAGE_SIZE
    pages = np.arange(shape.cache.num_pages).reshape(num_seqs, -1)
    positions = np.arange(seq_len - num_queries, seq_len)
    slots = pages[:, positions // page_size] * page_size + positions % page_size
    arrays = {
        "token_ids": np.zeros((num_seqs, num_queries)),
        "slot_mapping": slots,
        "query_starts": np.full(num_seqs, seq_len - num_queries),
        "seq_lens": np.full(num_seqs, seq_len),
        "block_table": pages,
    }
    return fp8kv.Batch(**{k: jnp.asarray(x, jnp.int32) for k, x in arrays.items()})


def _rows(shape: StepShape, num_queries: int, heads: tuple[int, ...]) -> Iterator[Any]:
    """Makes random q, k and v of all layers."""
    for key, num_heads in zip(
        jax.random.split(jax.random.key(0), 3), heads, strict=True
    ):
        size = shape.model.num_layers, shape.num_seqs, num_queries, num_heads
        rows = jax.random.normal(key, (*size, shape.model.head_dim), jnp.bfloat16)
        yield tuple(rows)
