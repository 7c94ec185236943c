"""The whole decode step of Llama-3.1-8B's shape against the bytes it has to read.

Wall time from step to step while the next ones are under way, as a loop runs them that
never lets the device wait. The limit is all weights but the embedding, and all K and V,
at the copy ceiling.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fp8kv_jax as fp8kv
from benchmarks import llama_step, turn
from benchmarks.llama_step import StepShape
from benchmarks.rows import implementations, moved, relative_error, spread
from benchmarks.timing import Times, kernel_times, steady_times, wall_times
from models.config import ModelConfig

# Norm of the difference of logits over their norm. Attention agrees to 2^-8, and 32
# layers of random weights amplify that (0.05 on an H200); unrelated logits give 1.4.
TOLERANCE = 2.0**-3
# Shapes of a serving loop: decode batches, and prefill chunks of one sequence.
BUCKETS = ((1, 1), (8, 1), (32, 1), (64, 1), (1, 16), (1, 128), (1, 1024))
OUR_KERNELS = ("kv_append", "paged_attention")

type Row = dict[str, Any]
type Reset = Callable[[fp8kv.CalibrationState], fp8kv.CalibrationState]


def run(small: bool) -> Iterator[Row]:
    """Compiles the steps of a serving loop, then checks and times them.

    Args:
      small: one small layer, for a machine without a GPU.

    Yields:
      One row per shape and phase, and one per compilation.
    """
    model = llama_step.llama_config()
    sizes = ((32, 4096), (64, 8192))
    if small:
        model = _small_model()
        sizes = ((2, 256),)
    forward, params = llama_step.abstract_params(model)
    shapes = [StepShape(model=model, num_seqs=n, seq_len=s) for n, s in sizes]
    buckets, measured = BUCKETS[:1] if small else BUCKETS, shapes[0]
    shapes += [replace(shape, dtype="bf16") for shape in shapes]
    shapes.sort(key=lambda shape: shape.seq_len)
    lowered = [_lower_steps(forward, params, shape) for shape in shapes]
    turn.take()
    # Before anything is compiled: what XLA has autotuned, it does not tune again. What
    # is not in these times is the import of Mosaic.
    yield from _compile_rows(forward, params, measured, buckets)
    steps = turn.compile_all(lowered)
    _, params = llama_step.random_params(model)
    for shape, compiled in zip(shapes, steps, strict=True):
        yield from _Bench(params, shape, compiled, repeats=5 if small else 40).rows()


class _Steps(NamedTuple):
    """The steps of one shape; `reference` is None where it is the step."""

    step: Any
    released: Any | None
    reference: Any | None


def _lower_steps(forward: Any, params: Any, shape: StepShape) -> _Steps:
    def lowered(**options: Any) -> jax.stages.Lowered:
        return llama_step.lower_step(forward, params, shape, **options)

    return _Steps(
        step=lowered(),
        released=lowered(released=True) if shape.dtype == "fp8" else None,
        reference=lowered(implementation="xla") if implementations()[1:] else None,
    )


def _small_model() -> ModelConfig:
    return llama_step.llama_config(
        num_layers=1,
        hidden_size=256,
        num_q_heads=4,
        num_kv_heads=2,
        intermediate_size=512,
        vocab_size=1000,
    )


def _compile_rows(
    forward: Any, params: Any, shape: StepShape, buckets: tuple[tuple[int, int], ...]
) -> Iterator[Row]:
    """Times one compilation alone, and those of a serving loop in threads."""
    jax.clear_caches()
    started = time.perf_counter()
    _lower(forward, params, shape, (shape.num_seqs, 1)).compile()
    yield _compile_row(f"decode {shape.name}", time.perf_counter() - started)
    jax.clear_caches()
    started = time.perf_counter()
    lowered = [_lower(forward, params, shape, bucket) for bucket in buckets]
    with ThreadPoolExecutor(max_workers=len(buckets)) as pool:
        list(pool.map(jax.stages.Lowered.compile, lowered))
    case = f"{len(buckets)} buckets of a serving loop"
    yield _compile_row(case, time.perf_counter() - started)


def _lower(
    forward: Any, params: Any, shape: StepShape, bucket: tuple[int, int]
) -> jax.stages.Lowered:
    num_seqs, num_queries = bucket
    cache = jax.eval_shape(lambda: fp8kv.init_cache(shape.cache))
    state = jax.eval_shape(
        lambda: llama_step.calibrating_state(shape, max_tokens_per_step=1024)
    )
    pages_per_seq = shape.seq_len // llama_step.PAGE_SIZE

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    batch = fp8kv.Batch(
        token_ids=ints(num_seqs, num_queries),
        slot_mapping=ints(num_seqs, num_queries),
        query_starts=ints(num_seqs),
        seq_lens=ints(num_seqs),
        block_table=ints(num_seqs, pages_per_seq),
        page_copies=ints(0, 2),
    )
    step = fp8kv.make_steps(forward).prefill_step
    return turn.lower(step, params, cache, state, batch, donate=(1, 2))


def _compile_row(case: str, seconds: float) -> Row:
    names = {"op": "compile", "case": case, "implementation": implementations()[0]}
    return names | spread(Times.of([1e6 * seconds]), "wall")


class _Bench:
    """One shape: the pools and the state that its steps hand on to each other."""

    def __init__(
        self, params: Any, shape: StepShape, steps: _Steps, *, repeats: int
    ) -> None:
        self.params, self.shape, self.steps = params, shape, steps
        self.repeats, self.step = repeats, steps.step
        self.cache = llama_step.full_cache(shape)
        self.state = llama_step.frozen_state(shape)
        self.batch = llama_step.decode_batch(shape)

    def rows(self) -> Iterator[Row]:
        is_fp8 = self.shape.dtype == "fp8"
        name = self.shape.name if is_fp8 else f"{self.shape.name}-bf16"
        checked = self._check()
        frozen = self._row(name, self._steady()) | checked
        # Before the kernels are timed, so that CUPTI has no part in it.
        frozen["dispatch_us"] = self._dispatch().median
        yield frozen | self._device()
        if not is_fp8:
            return
        self.state = llama_step.begin_window(self.state)
        yield self._phase("calibrating", self._steady(), frozen)
        self.state = llama_step.freeze(self.state)
        alone = self._row(f"{name}-alone", self._alone())
        yield alone
        freeze = self._alone(llama_step.almost_complete_window)
        yield self._phase("freeze", freeze, alone)
        assert self.steps.released is not None
        self.state = fp8kv.release_window(self.state)
        self.step = self.steps.released
        yield self._phase("released", self._steady(), frozen)

    def _phase(self, phase: str, times: Times, frozen: Row) -> Row:
        row = self._row(f"{self.shape.name}-{phase}", times)
        return row | {"over_frozen": row["wall_us"] / frozen["wall_us"]}

    def _row(self, case: str, times: Times) -> Row:
        names = {"op": "decode_step", "case": case}
        row = names | {"implementation": implementations()[0]}
        num_bytes = llama_step.weight_bytes(self.params) + self.shape.kv_bytes
        return row | spread(times, "wall") | moved((num_bytes,), times.median)

    def _run(self) -> jax.Array:
        logits, self.cache, self.state = self.step(
            self.params, self.cache, self.state, self.batch
        )
        return logits

    def _check(self) -> Row:
        """Compares the logits with those of the reference, where that is another."""
        logits = self._run()
        if self.steps.reference is None:
            return {}
        self.step = self.steps.reference
        expected = self._run()
        self.step = self.steps.step
        error = relative_error(logits, expected)
        if not error <= TOLERANCE:
            raise AssertionError(
                f"Expected logits within {TOLERANCE} of the reference's, got {error}."
            )
        return {"relative_error": error}

    def _steady(self) -> Times:
        """Times the steps of a loop; a window stays open while it does."""
        self._run()
        return steady_times(self._run, repeats=self.repeats)

    def _alone(self, reset: Reset = lambda state: state) -> Times:
        """Times steps that are waited for; each may begin with another state."""
        samples = []
        for _ in range(20):
            self.state = jax.block_until_ready(reset(self.state))
            samples.append(wall_times([self._run], repeats=1).median)
        return Times.of(samples)

    def _dispatch(self) -> Times:
        """Times what the host does for a step: until the call returns."""
        samples = []
        for _ in range(20):
            started = time.perf_counter()
            logits = self._run()
            samples.append(1e6 * (time.perf_counter() - started))
            jax.block_until_ready(logits)
        return Times.of(samples)

    def _device(self) -> Row:
        """Sums the kernels' time: of the step, and of append and attention."""
        if jax.default_backend() != "gpu":
            return {}
        timed = kernel_times([self._run], repeats=20)
        ours = [
            sum(us for name, us in kernels if any(k in name for k in OUR_KERNELS))
            for kernels in timed
        ]
        return {
            "device_us": Times.of([sum(us for _, us in k) for k in timed]).median,
            "num_kernels": statistics.median_low([len(kernels) for kernels in timed]),
            "append_attention_us": Times.of(ours).median,
            "kv_bytes": self.shape.kv_bytes,
        }
