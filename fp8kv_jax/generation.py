"""A generation loop: chunked prefill, one ragged batch of decoding, events as it goes.

generator = Generator(
    forward,
    params,
    CacheConfig(num_layers=30, num_kv_heads=3, head_dim=64, num_pages=8),
    CalibrationConfig(window_tokens=256),
    num_seqs=2,
    max_seq_len=512,
)
for event in generator.generate(prompts, GenerationConfig(), eos_ids={2}):
    match event:
        case Token(): ...
        case Frozen(): ...
"""

import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fp8kv_jax.batch import Batch
from fp8kv_jax.block_table import BlockTable, make_batch
from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import CalibrationConfig, init_calibration
from fp8kv_jax.decode import Forward, make_steps
from fp8kv_jax.drift.telemetry import Telemetry
from fp8kv_jax.parallel import Placement, make_cache
from fp8kv_jax.sampling import greedy, sample
from fp8kv_jax.scales.scale_set import ScaleSet
from pallas_kernels.dispatch import Implementation

type FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How tokens are chosen and when to stop, checked when built.

    Args:
      max_new_tokens: tokens to generate for each prompt at most.
      temperature: 0 takes the likeliest token; above, tokens are drawn.
      top_p: draws come from the likeliest tokens that together reach this share.
      seed: what draws depend on.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"Expected max_new_tokens to be at least 1, got {self.max_new_tokens}."
            )
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                "Expected temperature to be a finite number from 0 (greedy) on, "
                f"got {self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Expected top_p to be within (0, 1], got {self.top_p}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(
                f"Expected seed to be within 0..{2**32 - 1}, got {self.seed}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling:
    """A step of a new shape is about to be compiled."""

    num_seqs: int
    num_queries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """A chunk of a prompt went through the model."""

    sequence: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A sequence got a token; with `finish_reason` it is its last."""

    sequence: int
    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """The batch just run completed the window: scales are final, slots requantized."""

    window_tokens: int
    tokens_seen: int
    num_requantized: int
    num_batches: int


type Event = Compiling | Prefilled | Token | Frozen


@dataclass(kw_only=True, slots=True)
class Timing:
    """Seconds and tokens so far; time between events belongs to the caller.

    `decode_tokens` counts the tokens that decode steps produced: all but the first of
    each sequence, which its prefill gives.
    """

    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_tokens else None


class Generator:
    """Generates text for up to `num_seqs` prompts at a time, in shapes fixed by them.

    Calls of `generate` share one cache and one calibration: tokens of all of them
    count toward the window, and prompts of any length reuse the compiled steps.

    Args:
      forward: the model; see `fp8kv_jax.decode.Forward`.
      params: its parameters.
      cache_config: sizes and dtypes of the cache.
      calibration_config: how scales are found.
      num_seqs: prompts in a batch at most.
      max_seq_len: longest sequence, prompt and new tokens together.
      scales: scales that are known already, of the layers that do not calibrate.
      prefill_chunks: widths of prefill steps. A chunk is padded to one of them, so
        that prompts of new lengths compile nothing.
      telemetry: also count how live K and V fit final scales; see `telemetry`.
      implementation: which kernels to use; None for the best that works.
      placement: how heads lie on a mesh without a data axis, where `params` lie
        already; None for one device.

    Attributes:
      cache: the pools after the newest step.
      calibration: the state after the newest step.
      calibrates: whether there is a layer whose scales are found online.
      window_tokens: how many tokens freeze the scales.
      tokens_seen: real tokens observed so far, as the host knows it.
      frozen_at: `tokens_seen` when the scales froze; None until then.
      timing: seconds and tokens so far.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache_config: CacheConfig,
        calibration_config: CalibrationConfig,
        *,
        num_seqs: int,
        max_seq_len: int,
        scales: ScaleSet | None = None,
        prefill_chunks: tuple[int, ...] = (16, 128),
        telemetry: bool = False,
        implementation: Implementation | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.num_seqs = num_seqs
        self.max_seq_len = max_seq_len
        self.prefill_chunks = tuple(sorted(prefill_chunks))
        self.cache = make_cache(cache_config, placement)
        self.calibration = init_calibration(
            calibration_config,
            cache_config,
            max_tokens_per_step=max(num_seqs, *prefill_chunks),
            scales=scales,
            telemetry=telemetry,
        )
        if placement is not None:
            self.calibration = placement.put(self.calibration)
        self.tokens_seen = 0
        self.frozen_at: int | None = None
        self.timing = Timing()
        self._params = params
        self._placement = placement
        self.calibrates = bool(self.calibration.calibrating_layers)
        self.window_tokens = calibration_config.window_tokens
        self._table = BlockTable(
            num_pages=cache_config.num_pages,
            page_size=cache_config.page_size,
            num_seqs=num_seqs,
            max_seq_len=max_seq_len,
        )
        steps = make_steps(forward, implementation=implementation, placement=placement)
        self._step = jax.jit(steps.prefill_step, donate_argnums=(1, 2))
        self._compiled: dict[tuple[int, int], jax.stages.Compiled] = {}

    @property
    def telemetry(self) -> Telemetry | None:
        """What was counted up to the newest step; None if not asked for.

        The next step takes it over: `summarize` it before, or copy it.
        """
        return self.calibration.telemetry

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        *,
        eos_ids: Collection[int] = (),
    ) -> Iterator[Event]:
        """Continues some prompts; what happens comes as events, in order.

        One iterator at a time; its pages are free again once it ends or is closed.

        Args:
          prompts: token ids of each prompt, none of them empty.
          config: how tokens are chosen and when to stop.
          eos_ids: tokens that end a sequence; they are reported, then it stops.

        Raises:
          ValueError: if a prompt is empty or too long, or there are too many.
          OutOfPagesError: (from the iterator) if the pool is too small.
        """
        self._check(prompts)
        sequences = [
            _Sequence(
                prompt=prompt,
                limit=min(config.max_new_tokens, self.max_seq_len - len(prompt)),
            )
            for prompt in prompts
        ]
        return self._run(_Run(sequences, _chooser(config), frozenset(eos_ids)))

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        if not 1 <= len(prompts) <= self.num_seqs:
            raise ValueError(
                f"Expected from 1 to {self.num_seqs} prompts (num_seqs), "
                f"got {len(prompts)}."
            )
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) < self.max_seq_len:
                raise ValueError(
                    f"Expected prompt {index} to have from 1 to "
                    f"{self.max_seq_len - 1} tokens (max_seq_len, less one for a new "
                    f"token), got {len(prompt)}."
                )

    def _run(self, run: "_Run") -> Iterator[Event]:
        try:
            yield from self._compile_ahead(run)
            for index in range(len(run.sequences)):
                yield from self._prefill(run, index)
            while active := run.active():
                yield from self._decode(run, active)
        finally:
            for index in range(len(run.sequences)):
                self._table.free(index)

    def _compile_ahead(self, run: "_Run") -> Iterator[Event]:
        """Compiles what these prompts need, so that later times are of work alone."""
        shapes = [
            (1, width)
            for sequence in run.sequences
            for _, width in plan_chunks(len(sequence.prompt), self.prefill_chunks)
        ]
        if any(sequence.limit > 1 for sequence in run.sequences):
            shapes.append((self.num_seqs, 1))
        shapes = list(dict.fromkeys(shapes))
        missing = [shape for shape in shapes if shape not in self._compiled]
        for num_seqs, num_queries in missing:
            yield Compiling(num_seqs=num_seqs, num_queries=num_queries)
        started = time.perf_counter()
        self._compiled |= self._compile(missing)
        for shape in shapes:
            logits = self._compiled[shape].out_info[0]
            logits = jnp.zeros(logits.shape, logits.dtype)
            if self._placement is not None:
                where = self._compiled[shape].output_shardings[0]
                logits = jax.device_put(logits, where)
            zeros = np.zeros(shape[0], np.int32)
            run.choose(logits, zeros, zeros)
        self.timing.compile_s += time.perf_counter() - started

    def _compile(
        self, shapes: list[tuple[int, int]]
    ) -> dict[tuple[int, int], jax.stages.Compiled]:
        """Compiles the step for some shapes at once, each in a thread of its own.

        Much of a compilation runs on one core; and while this thread waits, it can
        be interrupted.
        """
        lowered = []
        for num_seqs, num_queries in shapes:
            nothing = make_batch(
                self._table, {}, {}, num_queries=num_queries, num_seqs=num_seqs
            )
            lowered.append(
                self._step.lower(self._params, self.cache, self.calibration, nothing)
            )
        pool = ThreadPoolExecutor(max_workers=max(1, len(shapes)))
        try:
            compiled = pool.map(jax.stages.Lowered.compile, lowered)
            return dict(zip(shapes, compiled, strict=True))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _prefill(self, run: "_Run", index: int) -> Iterator[Event]:
        sequence = run.sequences[index]
        for num_tokens, width in plan_chunks(len(sequence.prompt), self.prefill_chunks):
            started = time.perf_counter()
            start = sequence.length
            sequence.length += num_tokens
            chunk = sequence.prompt[start : sequence.length]
            batch = make_batch(
                self._table, {index: chunk}, {index: start}, num_queries=width
            )
            is_last = sequence.length == len(sequence.prompt)
            ids, frozen = self._advance(batch, run, [index] if is_last else [])
            self.timing.prefill_s += time.perf_counter() - started
            self.timing.prefill_tokens += num_tokens
            yield from frozen
            yield Prefilled(sequence=index, num_tokens=num_tokens)
            if is_last:
                yield run.take(index, int(ids[0]))
        if sequence.finished:
            self._table.free(index)

    def _decode(self, run: "_Run", active: list[int]) -> Iterator[Event]:
        """Runs one step of all sequences that go on; the other rows are padding."""
        started = time.perf_counter()
        batch = make_batch(
            self._table,
            {index: [run.sequences[index].newest] for index in active},
            {index: run.sequences[index].length for index in active},
            num_queries=1,
            num_seqs=self.num_seqs,
        )
        for index in active:
            run.sequences[index].length += 1
        ids, frozen = self._advance(batch, run, active)
        self.timing.decode_s += time.perf_counter() - started
        self.timing.decode_tokens += len(active)
        yield from frozen
        for row, index in enumerate(active):
            yield run.take(index, int(ids[row]))
            if run.sequences[index].finished:
                self._table.free(index)

    def _advance(
        self, batch: Batch, run: "_Run", rows: list[int]
    ) -> tuple[np.ndarray, list[Frozen]]:
        """Runs a step and chooses a token for each of `rows`, its first rows.

        The one wait for the device: token ids and, inside the window, its progress.
        """
        num_seqs, num_queries = batch.slot_mapping.shape
        step = self._compiled[num_seqs, num_queries]
        logits, self.cache, self.calibration = step(
            self._params, self.cache, self.calibration, batch
        )
        ids = None
        if rows:
            sequences, positions = np.zeros((2, logits.shape[0]), np.int32)
            sequences[: len(rows)] = rows
            positions[: len(rows)] = [run.sequences[row].length for row in rows]
            ids = run.choose(logits, sequences, positions)
        if not self.calibrates or self.frozen_at is not None:
            return jax.device_get(ids), []
        state = self.calibration
        ids, seen, frozen = jax.device_get((ids, state.tokens_seen, state.frozen))
        self.tokens_seen = int(seen)
        return ids, [self._note_freeze()] if frozen else []

    def _note_freeze(self) -> Frozen:
        state = self.calibration
        self.frozen_at = self.tokens_seen
        return Frozen(
            window_tokens=self.window_tokens,
            tokens_seen=self.tokens_seen,
            num_requantized=int(state.num_requantized),
            num_batches=int(state.batches_seen),
        )


type Choose = Callable[[Any, np.ndarray, np.ndarray], jax.Array]

_greedy, _sample = jax.jit(greedy), jax.jit(sample)


def _chooser(config: GenerationConfig) -> Choose:
    if config.temperature == 0:
        return lambda logits, sequences, positions: _greedy(logits)
    return functools.partial(
        _sample,
        key=jax.random.key(config.seed),
        temperature=np.float32(config.temperature),
        top_p=np.float32(config.top_p),
    )


@dataclass(kw_only=True, slots=True)
class _Sequence:
    """A prompt under way: what the cache holds of it, and which token comes next."""

    prompt: Sequence[int]
    limit: int
    length: int = 0
    num_new: int = 0
    newest: int = -1
    finished: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """What one call of `generate` works on."""

    sequences: list[_Sequence]
    choose: Choose
    eos_ids: frozenset[int]

    def active(self) -> list[int]:
        return [i for i, sequence in enumerate(self.sequences) if not sequence.finished]

    def take(self, index: int, token_id: int) -> Token:
        """Adds the token chosen for a sequence, and ends the sequence if it is time."""
        sequence = self.sequences[index]
        sequence.newest = token_id
        sequence.num_new += 1
        reason: FinishReason | None = None
        if token_id in self.eos_ids:
            reason = "stop"
        elif sequence.num_new >= sequence.limit:
            reason = "length"
        sequence.finished = reason is not None
        return Token(sequence=index, token_id=token_id, finish_reason=reason)


def plan_chunks(num_tokens: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Splits a prompt into (tokens, width of the step) with few different widths.

    Full chunks of the largest width; the rest goes into the smallest that holds it:
    with widths 16 and 128, 270 = 128 + 128 + 14 (in a step of 16).

    Args:
      num_tokens: tokens of the prompt.
      widths: in ascending order.
    """
    chunks = []
    while num_tokens > 0:
        width = next((w for w in widths if w >= num_tokens), widths[-1])
        chunks.append((min(num_tokens, width), width))
        num_tokens -= width
    return chunks
