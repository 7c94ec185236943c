"""All that a sweep needs of a trace, taken in one pass: amax by token, exact counts.

BF16 has 32,640 finite magnitudes, so a histogram over all of them loses nothing: what
any scale saturates, flushes or rounds away follows from it exactly.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int64, UInt16

from fp8kv_jax.drift.trace import Rows, Trace
from pallas_kernels.fp8 import FP8_MAX, SATURATED_ABOVE, UNDERFLOWED_AT

# Patterns of the magnitudes of BF16: below the first are zero and the subnormals,
# which count as zero; from the second on come Inf and NaN.
_FIRST_NORMAL, NUM_FINITE = 0x0080, 0x7F80
# Tokens read at once: bounds the memory of a pass.
BLOCK_TOKENS = 512


class StaticFormat(NamedTuple):
    """A number format that one scale for each group maps values into.

    Attributes:
      largest: finite value that `amax * headroom` is mapped to.
      saturated_above, underflowed_at: as in `pallas_kernels.fp8`: half a step beyond
        the largest, and half of the smallest step.
      dtype: what a value is rounded to; None for integers.
    """

    largest: float
    saturated_above: float
    underflowed_at: float
    dtype: np.dtype | None

    def round(self, y: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        """Clips and rounds scaled magnitudes, ties to even."""
        y = np.minimum(y, np.float32(self.largest))
        return np.rint(y) if self.dtype is None else y.astype(self.dtype).astype("f4")


# What a static scale maps amplitudes into, for counts from a histogram of them;
# `formats.FORMATS` are whole layouts of a cache, metadata included, that a model runs on.
NUMBER_FORMATS = {
    "fp8_e4m3": StaticFormat(
        FP8_MAX, SATURATED_ABOVE, UNDERFLOWED_AT, np.dtype(ml_dtypes.float8_e4m3fn)
    ),
    # 57344 = 1.75 * 2^15 and half a step of 2^13; the smallest step is 2^-16.
    "fp8_e5m2": StaticFormat(
        57344.0, 61440.0, 2.0**-17, np.dtype(ml_dtypes.float8_e5m2)
    ),
    "int8": StaticFormat(127.0, 127.5, 0.5, None),
    "int4": StaticFormat(7.0, 7.5, 0.5, None),
}


def magnitudes(rows: Rows) -> UInt16[np.ndarray, "..."]:
    """Turns BF16 rows into the patterns of their magnitudes, subnormal ones into 0."""
    patterns = np.ascontiguousarray(rows).view(np.uint16) & np.uint16(0x7FFF)
    return np.where(patterns < _FIRST_NORMAL, np.uint16(0), patterns)


def value_of(patterns: UInt16[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Turns patterns of BF16 magnitudes into their values."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def histogram(
    patterns: UInt16[np.ndarray, "num_layers num_tokens num_kv_heads head_dim"],
) -> Int64[np.ndarray, "num_layers num_kv_heads 32768"]:
    """Counts each pattern in each layer and KV head."""
    layers, _, heads, _ = patterns.shape
    counts = np.empty((layers, heads, 1 << 15), np.int64)
    for layer in range(layers):
        for head in range(heads):
            flat = patterns[layer, :, head].ravel()
            counts[layer, head] = np.bincount(flat, minlength=1 << 15)
    return counts


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How often each finite magnitude occurs; K is index 0, V is index 1.

    Attributes:
      values: the magnitudes that occur, ascending.
      counts: of each.
      nonfinite: how many values are NaN or Inf.
    """

    values: Float32[np.ndarray, "num_values"]
    counts: Int64[np.ndarray, "2 num_layers num_kv_heads num_values"]
    nonfinite: Int64[np.ndarray, "2 num_layers num_kv_heads"]

    @classmethod
    def of_patterns(
        cls, counts: Int64[np.ndarray, "2 num_layers num_kv_heads 32768"]
    ) -> "Histogram":
        seen = np.flatnonzero(counts[..., :NUM_FINITE].any(axis=(0, 1, 2)))
        return cls(
            values=value_of(seen.astype(np.uint16)),
            counts=counts[..., seen],
            nonfinite=counts[..., NUM_FINITE:].sum(axis=-1),
        )

    def __add__(self, other: "Histogram") -> "Histogram":
        values = np.union1d(self.values, other.values)
        counts = np.zeros((*self.counts.shape[:3], len(values)), np.int64)
        for part in (self, other):
            counts[..., np.searchsorted(values, part.values)] += part.counts
        return Histogram(
            values=values, counts=counts, nonfinite=self.nonfinite + other.nonfinite
        )

    def tally(
        self,
        scale: Float32[np.ndarray, "2 num_layers groups"],
        number_format: StaticFormat,
    ) -> "Tally":
        """Says what writing all of it at the given scales does."""
        heads = self.counts.shape[2]
        saturated, underflowed, error = (
            np.zeros(self.counts.shape[:3], dtype) for dtype in (int, int, float)
        )
        for index in np.ndindex(*self.counts.shape[:3]):
            group = index[2] * scale.shape[2] // heads
            one = scale[index[0], index[1], group]
            y = self.values * (np.float32(1) / one)
            counts = self.counts[index]
            saturated[index] = counts[y > number_format.saturated_above].sum()
            lost = (self.values != 0) & (y <= number_format.underflowed_at)
            underflowed[index] = counts[lost].sum()
            off = number_format.round(y).astype(float) * float(one) - self.values
            error[index] = (counts * off * off).sum()
        energy = (self.counts * self.values.astype(float) ** 2).sum(axis=-1)
        return Tally(saturated, underflowed, error, energy)


class Tally(NamedTuple):
    """What scales do to values, by K and V, layer and KV head.

    Attributes:
      saturated, underflowed: counts, as `pallas_kernels.fp8` defines them.
      squared_error, energy: sums of squares of the error and of the values.
    """

    saturated: Int64[np.ndarray, "2 num_layers num_kv_heads"]
    underflowed: Int64[np.ndarray, "2 num_layers num_kv_heads"]
    squared_error: np.ndarray
    energy: np.ndarray

    def relative_error(self) -> np.ndarray:
        """Root of squared error over energy: [2, num_layers], 0 without energy."""
        error, energy = self.squared_error.sum(axis=2), self.energy.sum(axis=2)
        return np.sqrt(error / np.where(energy > 0, energy, 1.0))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over a trace keeps of it.

    Attributes:
      token_amax: of each text, the patterns of the amax of its first tokens: enough
        for the longest window.
      histograms: of all values, by class of text.
    """

    token_amax: dict[str, UInt16[np.ndarray, "2 num_tokens num_layers num_kv_heads"]]
    histograms: dict[str, Histogram]
    _merged: dict[tuple[str, ...], Histogram] = field(default_factory=dict)

    def histogram(self, classes: Iterable[str]) -> Histogram:
        """All values of some classes as one; remembered, as many settings ask."""
        key = tuple(classes)
        if key not in self._merged:
            first, *rest = (self.histograms[name] for name in key)
            self._merged[key] = sum(rest, start=first)
        return self._merged[key]


def take_survey(
    trace: Trace, *, max_rows: int, advance: Callable[[int], None] = lambda _: None
) -> Survey:
    """Reads a trace once, a block of tokens at a time.

    Args:
      trace: what to read.
      max_rows: tokens of each text whose amax may matter to a window.
      advance: told how many tokens were read.
    """
    shape = (2, trace.shape.num_layers, trace.shape.num_kv_heads, 1 << 15)
    token_amax: dict[str, np.ndarray] = {}
    histograms = {}
    for data_class in trace.classes:
        counts = np.zeros(shape, np.int64)
        for text in (t for t in trace.texts if t.data_class == data_class):
            kept = []
            for start, *rows in trace.blocks(text.name, BLOCK_TOKENS):
                patterns = [magnitudes(x) for x in rows]
                for which, x in enumerate(patterns):
                    counts[which] += histogram(x)
                if start < max_rows:
                    kept.append(np.stack([_token_amax(x) for x in patterns]))
                advance(rows[0].shape[1])
            token_amax[text.name] = np.concatenate(kept, axis=1)[:, :max_rows]
        histograms[data_class] = Histogram.of_patterns(counts)
    return Survey(token_amax=token_amax, histograms=histograms)


def _token_amax(
    patterns: UInt16[np.ndarray, "num_layers num_tokens num_kv_heads head_dim"],
) -> UInt16[np.ndarray, "num_tokens num_layers num_kv_heads"]:
    finite = np.where(patterns < NUM_FINITE, patterns, np.uint16(0))
    return finite.max(axis=3).swapaxes(0, 1)
