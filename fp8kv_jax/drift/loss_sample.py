"""A small sample that runs with FP8 in any layers and heads, and with any scales.

One compiled step serves all trials: every layer attends through both caches, and a
mask says which heads' output goes on.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64

from fp8kv_jax.attention import attend
from fp8kv_jax.batch import Batch
from fp8kv_jax.block_table import BlockTable, make_batch
from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import FROZEN
from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.quality import compare_logits
from fp8kv_jax.drift.range import SavedRange
from fp8kv_jax.drift.replay_step import (
    Lane,
    begin_lane,
    end_lane,
    make_lane,
    squares_by_head,
    with_scales,
)
from fp8kv_jax.scales.scale_set import ScaleSet
from pallas_kernels.dispatch import Implementation

type Scales = Float32[np.ndarray, "2 fp8_layers num_kv_heads"]
type Mask = Bool[np.ndarray, "fp8_layers num_kv_heads"]


@dataclass(kw_only=True)
class Trial:
    """FP8 in the heads of `mask`, with some scales; and what came of it."""

    mask: Mask
    scales: Scales
    kl: float = 0.0
    same_top: int = 0
    num_tokens: int = 0

    @property
    def kl_mean(self) -> float:
        return self.kl / max(1, self.num_tokens)

    @property
    def top1_agreement(self) -> float:
        return self.same_top / max(1, self.num_tokens)


@dataclass(kw_only=True)
class Local:
    """What rounding does to attention whose inputs are the full-precision run's."""

    scales: Scales
    error: np.ndarray = field(default_factory=lambda: np.zeros(()))
    norm: np.ndarray = field(default_factory=lambda: np.zeros(()))
    num_saturated: int = 0


class _Step(NamedTuple):
    logits: Array
    error: Float32[Array, "num_layers num_kv_heads"]
    norm: Float32[Array, "num_layers num_kv_heads"]
    num_saturated: Array


@functools.lru_cache(maxsize=8)  # several samples of one model compile once
def _make_step(forward: Forward, implementation: Implementation | None) -> Callable:
    """Makes the jitted `(params, wide, fp8, batch, real, mask) -> (wide, fp8, _Step)`."""

    def run(params: Any, wide: Lane, fp8: Lane, batch: Batch, real: Array, mask: Array):
        fp8_layers = fp8.calibration.fp8_layers

        def blend(carry, layer, q, k, v, **options):
            wide_step, fp8_step, errors = carry
            options["implementation"] = implementation
            want, wide_step = attend(wide_step, layer, q, k, v, **options)
            out, fp8_step = attend(fp8_step, layer, q, k, v, **options)
            error = sum_squares(out, want, real, num_kv_heads=k.shape[2])
            if layer in fp8_layers:
                chosen = mask[fp8_layers.index(layer)]
                by_query = jnp.repeat(chosen, q.shape[2] // k.shape[2])
                want = jnp.where(by_query[None, None, :, None], out, want)
            return want, (wide_step, fp8_step, (*errors, error))

        steps = (begin_lane(lane, batch, implementation) for lane in (wide, fp8))
        logits, (*steps, errors) = forward(
            params, batch.token_ids, batch.positions, blend, (*steps, ())
        )
        lanes = [end_lane(step, implementation) for step in steps]
        error, norm = jnp.moveaxis(jnp.stack(errors), 1, 0)
        # The low limbs: what one step adds is far below 2^32.
        before, after = (_saturated(lane)[..., 1] for lane in (fp8, lanes[1]))
        step = _Step(logits, error, norm, jnp.sum(after - before))
        return *lanes, step

    return jax.jit(run, donate_argnums=(1, 2))


def sum_squares(
    out: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    want: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    real: Float32[Array, "num_tokens"],
    *,
    num_kv_heads: int,
) -> Float32[Array, "2 num_kv_heads"]:
    """Squared error and squared size of attention outputs over the real tokens."""
    squares = squares_by_head(out, want, num_kv_heads=num_kv_heads)
    return jnp.stack([jnp.sum(x * real[:, None], axis=0) for x in squares])


def relative_error(
    error: Float64[np.ndarray, "num_layers num_kv_heads"],
    norm: Float64[np.ndarray, "num_layers num_kv_heads"],
) -> tuple[float, ...]:
    """Relative error of each layer's attention output, from such sums."""
    pairs = zip(error.sum(axis=1), norm.sum(axis=1), strict=True)
    return tuple(float(np.sqrt(e / n)) if n else 0.0 for e, n in pairs)


def _saturated(lane: Lane) -> Array:
    state = lane.calibration
    tallies = (state.k_tally.saturated, state.v_tally.saturated)
    return jnp.stack([x[FROZEN] for x in tallies])


class LossSample:
    """A small sample, ready to run with FP8 in any heads and with any scales.

    Args:
      forward: the model.
      params: its parameters.
      samples: token ids; all are padded to the longest.
      cache: the FP8 cache of the replay.
      wide_dtype: "bf16" or "float32".
      scales: the saved ones, of every FP8 layer.
      tokens_per_step: tokens that go through the model at once.
      implementation: which kernels to use; None for the best that works.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        samples: Sequence[Sequence[int]],
        *,
        cache: CacheConfig,
        wide_dtype: str,
        scales: ScaleSet,
        tokens_per_step: int,
        implementation: Implementation | None = None,
    ) -> None:
        self.cache = cache
        self.saved = SavedRange.of(scales, cache.num_kv_heads, cache.fp8_layers)
        self.num_samples = len(samples)
        self.num_tokens = sum(map(len, samples))
        self.num_runs = 0
        self.forward = forward
        self.params = params
        self.implementation = implementation
        self._samples = samples
        self._width = max(map(len, samples))
        self._rows = min(len(samples), max(1, tokens_per_step // self._width))
        self._wide = self.make_lane(replace(cache, dtype=wide_dtype))
        # Scales by head serve both granularities: one step for all trials.
        self._fp8 = self.make_lane(cache, _by_head(scales, cache))
        self._step = _make_step(forward, implementation)

    def make_lane(self, cache: CacheConfig, scales: ScaleSet | None = None) -> Lane:
        """Makes an empty cache with room for a batch."""
        num_pages = self._rows * -(-self._width // cache.page_size)
        return make_lane(replace(cache, num_pages=num_pages), scales)

    def run(self, trials: Sequence[Trial], locals_: Sequence[Local]) -> Iterator[int]:
        """Runs trials over the sample and adds up what they lose, in place.

        Yields:
          The number of forward passes so far, after each.
        """
        nothing = np.zeros(self.saved.scale.shape[1:], bool)
        for batch, real in self.batches():
            reference = None
            for local in locals_:
                step = self._advance(batch, real, nothing, local.scales)
                local.error = local.error + np.asarray(step.error, np.float64)
                local.norm = local.norm + np.asarray(step.norm, np.float64)
                local.num_saturated += int(step.num_saturated)
                reference = step.logits  # the same whatever the scales
                yield self._count()
            if reference is None:
                step = self._advance(batch, real, nothing, self.saved.scale)
                reference = step.logits
                yield self._count()
            for trial in trials:
                step = self._advance(batch, real, trial.mask, trial.scales)
                kl, same = jax.device_get(compare_tokens(reference, step.logits, real))
                trial.kl += float(kl)
                trial.same_top += int(same)
                trial.num_tokens += int(np.sum(real))
                yield self._count()

    @property
    def num_batches(self) -> int:
        return -(-len(self._samples) // self._rows)

    def passes(self, num_trials: int, num_locals: int) -> int:
        """Forward passes that some trials take."""
        return self.num_batches * (num_trials + max(1, num_locals))

    def _count(self) -> int:
        self.num_runs += 1
        return self.num_runs

    def batches(self) -> Iterator[tuple[Batch, np.ndarray]]:
        """The sample's steps; 1 for each real token of them, 0 for padding."""
        table = BlockTable(
            num_pages=self._wide.cache.num_pages,
            page_size=self.cache.page_size,
            num_seqs=self._rows,
            max_seq_len=self._width,
        )
        for start in range(0, len(self._samples), self._rows):
            rows = dict(enumerate(self._samples[start : start + self._rows]))
            batch = make_batch(
                table,
                rows,
                dict.fromkeys(rows, 0),
                num_queries=self._width,
                num_seqs=self._rows,
            )
            real = np.zeros((self._rows, self._width), np.float32)
            for row, ids in rows.items():
                real[row, : len(ids)] = 1
            yield batch, real.reshape(-1)

    def _advance(
        self, batch: Batch, real: np.ndarray, mask: Mask, scales: Scales
    ) -> _Step:
        # The reciprocals are the artifact's own where the scales are.
        saved = scales is self.saved.scale
        inverse = self.saved.inv_scale if saved else np.float32(1) / scales
        fp8 = with_scales(self._fp8, jnp.array(scales), jnp.array(inverse))
        self._wide, self._fp8, step = self._step(
            self.params, self._wide, fp8, batch, jnp.asarray(real), jnp.asarray(mask)
        )
        return step


@jax.jit
def compare_tokens(reference: Array, logits: Array, real: Array) -> tuple[Array, Array]:
    """Sums KL and equal likeliest tokens over the real tokens."""
    full, fp8 = (x.reshape(-1, x.shape[-1]) for x in (reference, logits))
    labels = jnp.zeros(real.shape, jnp.int32)
    quality = compare_logits(full, fp8, labels, top_k=2, small_margin=0.0)
    same = (quality.full_top == quality.fp8_top) & (real > 0)
    # Padding may hold anything, and 0 * NaN is NaN.
    kl = jnp.where(real > 0, quality.kl, 0.0)
    return jnp.sum(kl), jnp.sum(same, dtype=jnp.int32)


def _by_head(scales: ScaleSet, cache: CacheConfig) -> ScaleSet:
    """The same scales, one for each head."""
    shape = (len(scales.layers), cache.num_kv_heads)
    fields = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale", "k_amax", "v_amax")
    spread = {x: np.broadcast_to(getattr(scales, x), shape).copy() for x in fields}
    return ScaleSet(layers=scales.layers, granularity="head", **spread)
