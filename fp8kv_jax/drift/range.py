"""How live keys and values lie in the range of saved scales: by layer, head and slice."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Int64

from fp8kv_jax.drift.result_range import (
    Flag,
    FlagKind,
    RangeReport,
    RangeSlice,
    RangeTable,
    Slice,
    Tensor,
)
from fp8kv_jax.drift.telemetry import bin_edges
from fp8kv_jax.drift.workload_slices import SliceTable
from fp8kv_jax.scales.scale_set import ScaleSet
from pallas_kernels.fp8 import FP8_MAX, SATURATED_ABOVE, TINY, UNDERFLOWED_AT

# What a flag is held against. A live amax may exceed the calibrated one by as much as
# the largest of other samples of the same traffic would; a head is an outlier when it
# costs the others of its layer 3 of E4M3's 18 octaves.
DRIFTED_RATIO = 1.5
OUTLIER_RATIO = 8.0
_GRAVEST = ("nonfinite", "clipped", "outlier_head", "drifted")
TENSORS = ("k", "v")
# Counts of one head: saturated values, tokens with one, underflowed, non-finite.
NUM_COUNTS = 4


class Reading(NamedTuple):
    """What rows say, by slice and KV head; layers and tensors are stacked in front."""

    amax: Float32[Array, "*stack num_slices num_kv_heads"]
    counts: Int32[Array, "*stack num_slices num_kv_heads 4"]
    histogram: Int32[Array, "*stack num_slices num_kv_heads num_bins"]


def add_by_slice(
    values: Float[Array, "num_tokens *rest"],
    slices: Int32[Array, "num_tokens dimensions"],
    num_slices: int,
) -> Float[Array, "num_slices *rest"]:
    """Sums over the tokens of each slice; slice `num_slices` is nobody's."""
    total = jnp.zeros((num_slices + 1, *values.shape[1:]), values.dtype)
    for column in range(slices.shape[1]):
        total = total.at[slices[:, column]].add(values)
    return total[:num_slices]


def read_range(
    rows: Float[Array, "num_tokens num_kv_heads head_dim"],
    inv_scale: Float32[Array, "num_kv_heads"],
    slices: Int32[Array, "num_tokens dimensions"],
    *,
    num_slices: int,
) -> Reading:
    """Reads one layer's keys or values, rounded to BF16 as a cache stores them.

    Args:
      rows: keys or values, in units of the model's activations.
      inv_scale: reciprocal of each head's saved scale.
      slices: the slices of each token, `num_slices` for padding.
      num_slices: how many there are.
    """
    # The barrier keeps XLA from deleting the rounding (`xla_allow_excess_precision`).
    x = jax.lax.optimization_barrier(rows.astype(jnp.bfloat16)).astype(jnp.float32)
    x = jnp.where(jnp.abs(x) < TINY, 0.0, x)
    finite = jnp.isfinite(x)
    size = jnp.where(finite, jnp.abs(x), 0.0)
    y = size * inv_scale[None, :, None]

    def count(which: Bool[Array, "..."]) -> Int32[Array, "num_tokens num_kv_heads"]:
        return jnp.sum(which, axis=2, dtype=jnp.int32)

    saturated = count(y > SATURATED_ABOVE)
    underflowed = count((size > 0) & (y <= UNDERFLOWED_AT))
    counts = (saturated, (saturated > 0).astype(jnp.int32), underflowed, count(~finite))
    # Above each edge, then differences: no scatter over single values.
    edges = np.concatenate([[-1.0], bin_edges()[:-1] * FP8_MAX]).astype(np.float32)
    above = jnp.stack([count(finite & (y > edge)) for edge in edges], axis=-1)
    histogram = above - jnp.pad(above[..., 1:], ((0, 0), (0, 0), (0, 1)))
    amax = jnp.max(size, axis=2)
    largest = jnp.zeros((num_slices + 1, amax.shape[1]), jnp.float32)
    for column in range(slices.shape[1]):
        largest = largest.at[slices[:, column]].max(amax)
    return Reading(
        amax=largest[:num_slices],
        counts=add_by_slice(jnp.stack(counts, axis=-1), slices, num_slices),
        histogram=add_by_slice(histogram, slices, num_slices),
    )


@dataclass(frozen=True, kw_only=True)
class SavedRange:
    """What an artifact's scales cover: each array `[2, layers, num_kv_heads]`, K first.

    `amax` is NaN where nobody knows what a scale rests on.
    """

    layers: tuple[int, ...]
    scale: Float32[np.ndarray, "2 layers num_kv_heads"]
    inv_scale: Float32[np.ndarray, "2 layers num_kv_heads"]
    amax: Float32[np.ndarray, "2 layers num_kv_heads"]
    per_head: bool

    @classmethod
    def of(cls, scales: ScaleSet, num_kv_heads: int, layers: tuple[int, ...]):
        """Lays the scales of some of the covered layers out by head."""
        rows = [scales.layers.index(layer) for layer in layers]

        def spread(kind: str) -> np.ndarray:
            both = (getattr(scales, f"{name}_{kind}")[rows] for name in TENSORS)
            shape = (len(rows), num_kv_heads)
            return np.stack([np.broadcast_to(x, shape) for x in both])

        return cls(
            layers=layers,
            scale=spread("scale"),
            inv_scale=spread("inv_scale"),
            amax=spread("amax"),
            per_head=scales.granularity == "head",
        )


class RangeSums:
    """Range tables under way, of a fixed size however much traffic they see.

    Arrays are `[2, layers, slices, heads, ...]`.
    """

    def __init__(self, saved: SavedRange, slices: SliceTable, *, head_dim: int) -> None:
        _, num_layers, num_heads = saved.scale.shape
        shape = (2, num_layers, len(slices), num_heads)
        self.saved = saved
        self.slices = slices
        self.head_dim = head_dim
        self.amax = np.zeros(shape, np.float32)
        self.counts = np.zeros((*shape, NUM_COUNTS), np.int64)
        self.histogram = np.zeros((*shape, len(bin_edges())), np.int64)
        self.num_tokens = np.zeros(len(slices), np.int64)

    def add(self, reading: Reading, num_tokens: Int64[np.ndarray, "slices"]) -> None:
        """Folds in what a step read, stacked over tensors and layers."""
        np.maximum(self.amax, reading.amax, out=self.amax)
        self.counts += reading.counts
        self.histogram += reading.histogram
        self.num_tokens += num_tokens

    @property
    def saturated_share(self) -> float:
        """Share of all values, over layers, heads, keys and values."""
        values = 2 * self.saved.scale[0].size * self.head_dim * int(self.num_tokens[0])
        return int(self.counts[:, :, 0, :, 0].sum()) / max(values, 1)

    def report(self, *, fp8_run_saturated: int | None) -> RangeReport:
        saved = self.saved
        k_scale, v_scale = (_amounts(x) for x in saved.scale)
        k_amax, v_amax = (_maybe_amounts(x) for x in saved.amax)
        edges = np.log2(bin_edges()[:-1])
        return RangeReport(
            layers=saved.layers,
            num_kv_heads=saved.scale.shape[2],
            head_dim=self.head_dim,
            k_scale=k_scale,
            v_scale=v_scale,
            k_calibrated_amax=k_amax,
            v_calibrated_amax=v_amax,
            histogram_edges=tuple(map(float, edges)),
            slices=tuple(map(self._slice, range(len(self.slices)))),
            flags=tuple(self.flags()),
            fp8_run_saturated=fp8_run_saturated,
        )

    def _slice(self, index: int) -> RangeSlice:
        dimension, name = self.slices.names[index]
        num_tokens = int(self.num_tokens[index])
        return RangeSlice(
            slice=Slice(dimension=dimension, name=name, num_tokens=num_tokens),
            k=self._table(0, index),
            v=self._table(1, index),
        )

    def _table(self, tensor: int, index: int) -> RangeTable:
        amax = self.amax[tensor, :, index]
        counts = self.counts[tensor, :, index]
        saturated, tokens, underflowed, nonfinite = (
            counts[..., i].tolist() for i in range(NUM_COUNTS)
        )
        return RangeTable(
            live_amax=_amounts(amax),
            ratio=_maybe_amounts(_ratio(amax, self.saved.amax[tensor])),
            saturated=saturated,
            saturated_tokens=tokens,
            underflowed=underflowed,
            nonfinite=nonfinite,
            histogram=self.histogram[tensor, :, index].tolist(),
        )

    def flags(self) -> list[Flag]:
        """What a person should look at, in all of the traffic, the gravest first."""
        _, num_layers, num_heads = self.saved.scale.shape
        found = [
            flag
            for tensor in range(2)
            for row in range(num_layers)
            for head in range(num_heads)
            for flag in self._flags(tensor, row, head)
        ]
        return sorted(found, key=lambda flag: (_GRAVEST.index(flag.kind), -flag.value))

    def _flags(self, tensor: int, row: int, head: int) -> Iterator[Flag]:
        """What is odd about one head's keys or values."""
        layer = self.saved.layers[row]
        name: Tensor = "v" if tensor else "k"

        def flag(kind: FlagKind, value: float, limit: float, words: str) -> Flag:
            return Flag(
                kind=kind,
                tensor=name,
                layer=layer,
                head=head,
                value=value,
                limit=limit,
                words=f"{name.upper()} of layer {layer}, head {head}: {words}",
            )

        saturated, tokens, _, nonfinite = map(int, self.counts[tensor, row, 0, head])
        live = self.amax[tensor, row, 0]
        if saturated:
            words = (
                f"{_count(saturated, 'saturated value')} in {_count(tokens, 'token')}"
            )
            yield flag("clipped", saturated, 0, words)
        if nonfinite:
            yield flag("nonfinite", nonfinite, 0, f"{nonfinite} NaN or Inf")
        ratio = float(_ratio(live, self.saved.amax[tensor, row])[head])
        if ratio > DRIFTED_RATIO:
            words = f"the live maximum is {ratio:.3g} times the calibrated one"
            yield flag("drifted", ratio, DRIFTED_RATIO, words)
        others = np.delete(live, head)
        if self.saved.per_head or not others.size or not np.median(others):
            return
        excess = float(live[head] / np.median(others))
        if excess > OUTLIER_RATIO:
            words = f"{excess:.3g} times the median of the other heads, in one scale"
            yield flag("outlier_head", excess, OUTLIER_RATIO, words)


def _ratio(live: np.ndarray, calibrated: np.ndarray) -> np.ndarray:
    """Live over calibrated amax; NaN where that is unknown or zero."""
    known = np.where(calibrated > 0, calibrated, np.nan)
    return live.astype(np.float64) / known


def _amounts(x: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in x)


def _maybe_amounts(x: np.ndarray) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(None if np.isnan(v) else float(v) for v in row) for row in x)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
