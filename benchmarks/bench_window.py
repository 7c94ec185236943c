"""What the calibration window costs: inside it, at the freeze, and after the release.

Steps of 32 layers without a model: begin, append and attend in each layer, end. Wall
time, because CUPTI does not see kernels behind a condition of a CUDA graph: steps in a
row for what each calibrating step adds to a frozen one, a step alone for the freeze.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from benchmarks import llama_step, turn
from benchmarks.llama_step import StepShape
from benchmarks.rows import implementations, spread
from benchmarks.timing import Times

WINDOWS = (1, 16, 64, 256, 1024, 4096)
REPEATS = 20
CHAINED = 10  # steps in a row

type Row = dict[str, Any]
type State = fp8kv.CalibrationState
type Rows = tuple[jax.Array, jax.Array, jax.Array]


def run(small: bool) -> Iterator[Row]:
    """Checks that each window freezes, then times the phases around it.

    Args:
      small: two small layers and two windows, for a machine without a GPU.

    Yields:
      One row per window and phase; those of `freeze` also say what the whole window
      adds, filled by one token of each sequence in each step.
    """
    model = llama_step.llama_config(num_layers=2, num_q_heads=4, num_kv_heads=2)
    shape = StepShape(model=model, num_seqs=2, seq_len=256)
    if not small:
        shape = StepShape(model=llama_step.llama_config(), num_seqs=8, seq_len=16384)
    windows = WINDOWS[2:4] if small else WINDOWS
    lowered = [
        _lower(jax.eval_shape(functools.partial(_arguments, shape, window)))
        for window in windows
    ]
    for window, step in zip(windows, turn.compile_all(lowered), strict=True):
        bench = _Bench(shape, window, step)
        yield from bench.rows()
    yield from bench.release_rows()


def _arguments(shape: StepShape, window: int) -> tuple[Any, ...]:
    """Makes the cache, the state, the batch, and one layer's q, k and v."""
    model, keys = shape.model, jax.random.split(jax.random.key(0), 3)
    heads = model.num_q_heads, model.num_kv_heads, model.num_kv_heads
    qkv = tuple(
        jax.random.normal(key, (shape.num_seqs, 1, n, 128), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )
    state = llama_step.calibrating_state(shape, window_tokens=window)
    return llama_step.full_cache(shape), state, llama_step.decode_batch(shape), qkv


def _lower(arguments: tuple[Any, ...]) -> jax.stages.Lowered:
    return turn.lower(_step, *arguments, donate=(0, 1))


class _Bench:
    """Steps of one window's length."""

    def __init__(
        self, shape: StepShape, window: int, step: jax.stages.Compiled
    ) -> None:
        self.shape, self.window, self.step = shape, window, step
        self.cache, self.state, self.batch, self.qkv = _arguments(shape, window)

    def rows(self) -> Iterator[Row]:
        self._check()
        num_before = -(-self.window // self.shape.num_seqs) - 1
        window_us = 0.0
        if num_before:  # else the first step ends it
            chained = min(CHAINED, num_before)
            resets = llama_step.freeze, llama_step.begin_window
            frozen, calibrating = self._times(resets, chained)
            yield self._row("frozen", frozen)
            yield self._row("calibrating", calibrating)
            window_us = num_before * (calibrating.median - frozen.median)
        resets = llama_step.freeze, llama_step.almost_complete_window
        alone, freeze = self._times(resets)
        yield self._row("frozen, alone", alone)
        window_us += freeze.median - alone.median
        yield self._row("freeze, alone", freeze) | {"window_us": window_us}

    def release_rows(self) -> Iterator[Row]:
        """Times giving the window back, and the step that is left."""
        started = time.perf_counter()
        self.state = fp8kv.release_window(self.state)
        released = Times.of([1e6 * (time.perf_counter() - started)])
        yield self._row("release_window()", released)
        started = time.perf_counter()
        self.step = _lower((self.cache, self.state, self.batch, self.qkv)).compile()
        compiled = Times.of([1e6 * (time.perf_counter() - started)])
        yield self._row("compile the released step", compiled)
        (released,) = self._times([lambda state: state], CHAINED)
        yield self._row("released", released)

    def _row(self, phase: str, wall: Times) -> Row:
        row = {"op": "window", "case": f"{self.window} {phase}"}
        row |= {"implementation": implementations()[0]} | spread(wall, "wall")
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(self.state.staged))
        return row | {"staged_bytes": num_bytes}

    def _run(self) -> jax.Array:
        out, self.cache, self.state = self.step(
            self.cache, self.state, self.batch, self.qkv
        )
        return out

    def _times(
        self, resets: Sequence[Callable[[State], State]], chained: int = 1
    ) -> list[Times]:
        """Times steps in a row from each of some states, in turn, which cancels drift."""
        walls: list[list[float]] = [[] for _ in resets]
        for _ in range(REPEATS + 1):
            for times, reset in zip(walls, resets, strict=True):
                self.state = jax.block_until_ready(reset(self.state))
                started = time.perf_counter()
                for _ in range(chained):
                    out = self._run()
                jax.block_until_ready(out)
                times.append(1e6 * (time.perf_counter() - started) / chained)
        return [Times.of(times[1:]) for times in walls]

    def _check(self) -> None:
        self.state = llama_step.almost_complete_window(self.state)
        self._run()
        slots = np.asarray(self.batch.slot_mapping).ravel()
        expected = len(set(range(self.window - 1)) | set(slots.tolist()))
        requantized = int(self.state.num_requantized)
        if not bool(self.state.frozen) or requantized != expected:
            raise AssertionError(
                f"Expected {expected} slots requantized at the freeze of a window of "
                f"{self.window}, got {requantized}, frozen: {bool(self.state.frozen)}."
            )


def _step(
    cache: fp8kv.PagedKVCache,
    state: fp8kv.CalibrationState,
    batch: fp8kv.Batch,
    qkv: Rows,
) -> tuple[jax.Array, fp8kv.PagedKVCache, fp8kv.CalibrationState]:
    step = fp8kv.begin_step(cache, state, batch)
    q, k, v = qkv
    for layer in range(cache.num_layers):
        q, step = fp8kv.attend(step, layer, q, k, v)
    return q, *fp8kv.end_step(step)
