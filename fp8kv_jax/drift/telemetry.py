"""What live traffic says about FP8 scales, counted on the device inside the step.

    calibration = init_calibration(config, cache_config, ..., telemetry=True)
    logits, cache, calibration = step(params, cache, calibration, batch)
    summary = summarize(calibration.telemetry)  # any time; waits for the device

A layer's rows count once its scales are final: inside the window they are written at
a provisional scale, which says nothing about the final one. Counters only grow. To
count a slice of the traffic apart, start it with
`replace(calibration, telemetry=init_telemetry(cache_config))`; `merge` puts slices
together again. Start anew after `recalibrate` as well, lest two scales mix.
"""

from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from fp8kv_jax import counters as counter
from fp8kv_jax.cache import CacheConfig
from pallas_kernels.fp8 import (
    FP8_MAX,
    SATURATED_ABOVE,
    UNDERFLOWED_AT,
    RowStatistics,
)

# Upper edges of the histogram's bins are 2^-18 .. 2^3 of the range that a scale
# covers; below lies what is stored as zero, above the last bin without an upper edge.
LOWEST_OCTAVE, HIGHEST_OCTAVE = -18, 3
NUM_BINS = HIGHEST_OCTAVE - LOWEST_OCTAVE + 3
# Up to here the K and V rows of all layers wait for the end of the step and are
# counted in one pass; more would hold too much memory and are counted by layer.
MAX_TOKENS_AT_ONCE = 512


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """What was counted so far, the `telemetry` of a `CalibrationState`.

    By K (0) and V (1), FP8 layer and KV head:

    Attributes:
      amax: largest finite `abs(x)`, in units of x.
      saturated: values that are finite with `abs(x * inv_scale) > 464`.
      saturated_tokens: tokens with a saturated value in this head.
      underflowed: values that are nonzero with `abs(x * inv_scale) <= 2^-10`.
      nonfinite: values that are NaN or Inf.
      histogram: finite values by `abs(x) / (448 * scale)`; see `bin_edges`.
      tokens: by FP8 layer alone, real tokens counted; each gives `head_dim` values of
        K and of V to every KV head.
      fp8_layers: the layers that the rows stand for.
      head_dim: values of a token in one head.
    """

    amax: Float32[Array, "2 fp8_layers num_kv_heads"]
    saturated: counter.Counter
    saturated_tokens: counter.Counter
    underflowed: counter.Counter
    nonfinite: counter.Counter
    histogram: counter.Counter
    tokens: counter.Counter
    fp8_layers: tuple[int, ...] = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})


def init_telemetry(cache: CacheConfig) -> Telemetry:
    """Makes telemetry that has counted nothing.

    Returns:
      Telemetry that owns its buffers.
    """
    shape = 2, len(cache.fp8_layers), cache.num_kv_heads
    return Telemetry(
        amax=jnp.zeros(shape, jnp.float32),
        saturated=counter.zeros(*shape),
        saturated_tokens=counter.zeros(*shape),
        underflowed=counter.zeros(*shape),
        nonfinite=counter.zeros(*shape),
        histogram=counter.zeros(*shape, NUM_BINS),
        tokens=counter.zeros(shape[1]),
        fp8_layers=cache.fp8_layers,
        head_dim=cache.head_dim,
    )


def bin_edges() -> np.ndarray:
    """Upper edges of the bins, in parts of the range `448 * scale`: `[NUM_BINS]`.

    A bin holds what lies above the edge before it, up to its own edge, that included.
    The first, `2^-10 / 448`, holds zeros and underflowed values: all that is stored
    as zero. Edges `2^-18 .. 2^3` follow, one octave a bin (the first of them partly
    taken by the bin below), then infinity. The range ends at edge 1, and values up to
    464 / 448 of it, in the next bin, round back to its end.
    """
    octaves = np.arange(LOWEST_OCTAVE, HIGHEST_OCTAVE + 1)
    return np.array([UNDERFLOWED_AT / FP8_MAX, *np.exp2(octaves), np.inf])


def merge(a: Telemetry, b: Telemetry) -> Telemetry:
    """Adds two pieces of telemetry; associative and commutative, bit for bit.

    Raises:
      ValueError: if they count different layers or other sizes.
    """
    shapes = [(x.fp8_layers, x.amax.shape[2], x.head_dim) for x in (a, b)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "Expected telemetry of the same FP8 layers, num_kv_heads and head_dim, "
            f"got {shapes[0]} and {shapes[1]}."
        )

    def join(x: Array, y: Array) -> Array:
        is_amax = x.dtype == jnp.float32
        return jnp.maximum(x, y) if is_amax else counter.merge(x, y)

    return jax.tree.map(join, a, b)


class RowCounts(NamedTuple):
    """What one batch of rows says beyond `RowStatistics`, by layer and KV head."""

    saturated_tokens: Int32[Array, "*layers num_kv_heads"]
    histogram: Int32[Array, "*layers num_kv_heads num_bins"]


@jax.jit
def count_rows(
    rows: Float[Array, "*layers num_tokens num_kv_heads head_dim"],
    inv_scale: Float32[Array, "*layers groups"],
    real: Bool[Array, "num_tokens"],
) -> RowCounts:
    """Counts rows by how much of their scale's range they take.

    Args:
      rows: keys or values as they were appended.
      inv_scale: the reciprocal scale that wrote them, within [2^-100, 2^100], one for
        a layer or one for each KV head.
      real: which tokens count.
    """
    inv_scale = jnp.broadcast_to(inv_scale, (*rows.shape[:-3], rows.shape[-2]))
    y = jnp.abs(rows.astype(jnp.float32) * inv_scale[..., None, :, None])
    # Of x, since a finite x may overflow in y; such a y is counted as past the end.
    counted = jnp.isfinite(rows) & jnp.broadcast_to(real[:, None, None], rows.shape)
    saturated = jnp.any(counted & (y > SATURATED_ABOVE), axis=-1)
    bins = jnp.where(counted, _bin_of(y), NUM_BINS)[..., None, :]
    # Compared with every bin and summed in one fusion: a scatter would need atomics.
    every = jnp.arange(NUM_BINS, dtype=jnp.int32).reshape(*[1] * (rows.ndim - 1), -1, 1)
    return RowCounts(
        saturated_tokens=jnp.sum(saturated, axis=-2, dtype=jnp.int32),
        histogram=jnp.sum(bins == every, axis=(-4, -1), dtype=jnp.int32),
    )


def _bin_of(y: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The bin of each value, without a logarithm: exact on any device.

    The bits of positive floats, read as integers, grow as they do, and 2^k times as
    much is k << 23 more; one less, so that an edge belongs to the bin below it. What
    one device flushes to zero and another does not lies far inside the first bin.
    """
    end_of_range = np.float32(FP8_MAX).view(np.int32)
    octave = ((lax.bitcast_convert_type(y, jnp.int32) - end_of_range - 1) >> 23) + 1
    octave = jnp.clip(octave, LOWEST_OCTAVE, HIGHEST_OCTAVE + 1)
    return jnp.where(y <= UNDERFLOWED_AT, 0, octave - LOWEST_OCTAVE + 1)


def observe(
    telemetry: Telemetry,
    k: RowStatistics,
    v: RowStatistics,
    counts: RowCounts,
    *,
    num_tokens: Int32[Array, ""],
    listening: Bool[Array, "fp8_layers 1"],
) -> Telemetry:
    """Folds one batch into the telemetry.

    Args:
      telemetry: what was counted so far; donated by the step.
      k: statistics of the batch's keys, each field `[fp8_layers, num_kv_heads]`.
      v: likewise of its values.
      counts: of both, each field `[2, fp8_layers, num_kv_heads, ...]`.
      num_tokens: real tokens of the batch.
      listening: layers whose scales are final.
    """
    new = jax.tree.map(lambda *x: jnp.stack(x), k, v)

    def add(old: counter.Counter, amount: Array) -> counter.Counter:
        heard = listening.reshape(1, -1, *[1] * (amount.ndim - 2))
        return counter.add(old, jnp.where(heard, amount.astype(jnp.int32), 0))

    return replace(
        telemetry,
        amax=jnp.maximum(telemetry.amax, jnp.where(listening[None], new.amax, 0.0)),
        saturated=add(telemetry.saturated, new.num_saturated),
        saturated_tokens=add(telemetry.saturated_tokens, counts.saturated_tokens),
        underflowed=add(telemetry.underflowed, new.num_underflowed),
        nonfinite=add(telemetry.nonfinite, new.num_nonfinite),
        histogram=add(telemetry.histogram, counts.histogram),
        tokens=counter.add(telemetry.tokens, jnp.where(listening[:, 0], num_tokens, 0)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """What was counted of K or of V, `[fp8_layers, num_kv_heads]`; see `Telemetry`.

    Float32 for the amax, int64 for what is counted; the histogram has a last axis.
    """

    amax: np.ndarray
    saturated: np.ndarray
    saturated_tokens: np.ndarray
    underflowed: np.ndarray
    nonfinite: np.ndarray
    histogram: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetrySummary:
    """`Telemetry` on the host.

    Attributes:
      layers: the FP8 layers that the rows stand for.
      head_dim: values of a token in one head.
      tokens: int64 `[fp8_layers]`.
      k, v: by layer and head.
    """

    layers: tuple[int, ...]
    head_dim: int
    tokens: np.ndarray
    k: Readings
    v: Readings

    @property
    def values(self) -> np.ndarray:
        """Values counted in each KV head, of K and again of V: int64 [fp8_layers]."""
        return self.tokens * self.head_dim


def summarize(telemetry: Telemetry) -> TelemetrySummary:
    """Brings telemetry to the host; waits for the step that made it."""
    telemetry = jax.device_get(telemetry)

    def readings(which: int) -> Readings:
        values = {f.name: getattr(telemetry, f.name)[which] for f in fields(Readings)}
        amax = values.pop("amax")
        totals = {name: counter.total(value) for name, value in values.items()}
        return Readings(amax=amax, **totals)

    return TelemetrySummary(
        layers=telemetry.fp8_layers,
        head_dim=telemetry.head_dim,
        tokens=counter.total(telemetry.tokens),
        k=readings(0),
        v=readings(1),
    )
