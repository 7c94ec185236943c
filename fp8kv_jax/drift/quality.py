"""Quality, teacher-forced: two runs over the same tokens, compared token by token."""

import heapq
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from fp8kv_jax.drift.result_quality import (
    Misranking,
    PositionCurve,
    QualityReport,
    QualitySlice,
    WorstToken,
)
from fp8kv_jax.drift.result_range import Slice
from fp8kv_jax.drift.workload_slices import SliceTable

# Tokens whose distributions are compared at once: logits take memory.
_ROWS_AT_ONCE = 64
# Bins of the histogram that percentiles of the KL come from, in nats: what lies below
# the first counts as 0.
_KL_EDGES = 1e-12 * 1.12 ** np.arange(310)


class TokenQuality(NamedTuple):
    """How the FP8 run's next-token distribution differs, token by token.

    Attributes:
      kl: KL(full || FP8), in nats.
      full_nll, fp8_nll: -log of the probability of the token that follows.
      flips: neighbours among the full-precision top k that changed places; and
        `close_flips`, those of them with a gap of at most the small margin.
      flipped_gap, gap: sum of the gaps of those that did, and of all.
      full_top, fp8_top: the likeliest next token.
      full_probability, fp8_probability: of each run's own likeliest token.
    """

    kl: Float32[Array, "num_tokens"]
    full_nll: Float32[Array, "num_tokens"]
    fp8_nll: Float32[Array, "num_tokens"]
    flips: Int32[Array, "num_tokens"]
    close_flips: Int32[Array, "num_tokens"]
    flipped_gap: Float32[Array, "num_tokens"]
    gap: Float32[Array, "num_tokens"]
    full_top: Int32[Array, "num_tokens"]
    fp8_top: Int32[Array, "num_tokens"]
    full_probability: Float32[Array, "num_tokens"]
    fp8_probability: Float32[Array, "num_tokens"]


def compare_logits(
    full: Float[Array, "num_tokens vocab_size"],
    fp8: Float[Array, "num_tokens vocab_size"],
    labels: Int32[Array, "num_tokens"],
    *,
    top_k: int,
    small_margin: float,
) -> TokenQuality:
    """Compares two runs' logits, a block of tokens at a time.

    Args:
      full: of the full-precision run.
      fp8: of the FP8 run.
      labels: the token that follows; anything where none does.
      top_k: likeliest tokens whose order is looked at.
      small_margin: gap of two logits up to which a flip is close.
    """

    def one(args: tuple[Array, Array, Array]) -> TokenQuality:
        return _compare(*args, top_k=top_k, small_margin=small_margin)

    return lax.map(one, (full, fp8, labels), batch_size=_ROWS_AT_ONCE)


def _compare(
    full: Float[Array, "vocab_size"],
    fp8: Float[Array, "vocab_size"],
    label: Int32[Array, ""],
    *,
    top_k: int,
    small_margin: float,
) -> TokenQuality:
    full, fp8 = full.astype(jnp.float32), fp8.astype(jnp.float32)
    full_sum, fp8_sum = (jax.nn.logsumexp(x) for x in (full, fp8))
    change = (fp8 - fp8_sum) - (full - full_sum)
    # KL = sum of p (exp(d) - 1 - d), since p and q both add up to 1: no term is
    # negative, so that a small KL does not drown in what the large terms round off.
    kl = jnp.sum(jnp.exp(full - full_sum) * _exp_beyond_line(change))
    top, ids = lax.top_k(full, min(top_k, full.size))
    gaps = top[:-1] - top[1:]
    other = fp8[ids]
    flipped = other[:-1] < other[1:]
    fp8_top = jnp.argmax(fp8)
    return TokenQuality(
        kl=kl,
        full_nll=full_sum - full[label],
        fp8_nll=fp8_sum - fp8[label],
        flips=jnp.sum(flipped, dtype=jnp.int32),
        close_flips=jnp.sum(flipped & (gaps <= small_margin), dtype=jnp.int32),
        flipped_gap=jnp.sum(jnp.where(flipped, gaps, 0.0)),
        gap=jnp.sum(gaps),
        full_top=ids[0].astype(jnp.int32),
        fp8_top=fp8_top.astype(jnp.int32),
        full_probability=jnp.exp(top[0] - full_sum),
        fp8_probability=jnp.exp(fp8[fp8_top] - fp8_sum),
    )


def _exp_beyond_line(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """exp(x) - 1 - x, by its series near 0; `expm1` is slow on a CPU, and cancels."""
    series = 1 + x / 8
    for power in (7, 6, 5, 4, 3):
        series = 1 + x / power * series
    return jnp.where(jnp.abs(x) < 0.5, x * x / 2 * series, jnp.exp(x) - 1 - x)


class QualitySums:
    """Quality by slice under way, of a fixed size however many tokens it sees.

    Args:
      slices: the slices.
      num_layers, num_kv_heads: of the model, for the attention error.
      top_k: as in `compare_logits`.
    """

    def __init__(
        self, slices: SliceTable, *, num_layers: int, num_kv_heads: int, top_k: int
    ) -> None:
        size = len(slices)
        self.slices = slices
        self._pairs = top_k - 1
        self._sums = {name: np.zeros(size) for name in _SUMMED}
        self._kl_max = np.zeros(size)
        self._histogram = np.zeros((size, len(_KL_EDGES) + 1), np.int64)
        heads = (num_layers, size, num_kv_heads)
        self._error, self._norm = np.zeros(heads), np.zeros(heads)

    def add(
        self,
        quality: TokenQuality,
        slices: Int32[np.ndarray, "num_tokens dimensions"],
        has_label: Bool[np.ndarray, "num_tokens"],
    ) -> None:
        """Folds in the real tokens of a step."""
        kl = np.asarray(quality.kl, np.float64)
        rows = {
            "tokens": np.ones_like(kl),
            "kl": kl,
            "top1": quality.full_top == quality.fp8_top,
            "labels": has_label,
            "full_nll": np.where(has_label, quality.full_nll, 0),
            "fp8_nll": np.where(has_label, quality.fp8_nll, 0),
            "flips": quality.flips,
            "close_flips": quality.close_flips,
            "flipped_gap": quality.flipped_gap,
            "gap": quality.gap,
        }
        bins = np.searchsorted(_KL_EDGES, kl)
        for column in slices.T:
            for name, values in rows.items():
                np.add.at(self._sums[name], column, np.asarray(values, np.float64))
            np.maximum.at(self._kl_max, column, kl)
            np.add.at(self._histogram, (column, bins), 1)

    def add_attention(
        self,
        error: Float32[np.ndarray, "num_layers slices num_kv_heads"],
        norm: Float32[np.ndarray, "num_layers slices num_kv_heads"],
    ) -> None:
        """Folds in squared errors of the attention output, and its squares."""
        self._error += error
        self._norm += norm

    def report(
        self, curves: tuple[PositionCurve, ...], worst: tuple[WorstToken, ...]
    ) -> QualityReport:
        by_head = np.sqrt(_quotient(self._error[:, 0], self._norm[:, 0]))
        filled = np.flatnonzero(self._sums["tokens"])
        return QualityReport(
            slices=tuple(self._slice(int(index)) for index in filled),
            attention_error=tuple(tuple(map(float, row)) for row in by_head),
            curves=curves,
            worst_tokens=worst,
        )

    def _slice(self, index: int) -> QualitySlice:
        dimension, name = self.slices.names[index]
        sums = {key: float(values[index]) for key, values in self._sums.items()}
        tokens, labels = sums["tokens"], sums["labels"]
        error, norm = (x[:, index].sum(axis=1) for x in (self._error, self._norm))
        return QualitySlice(
            slice=Slice(dimension=dimension, name=name, num_tokens=int(tokens)),
            kl_mean=sums["kl"] / tokens,
            kl_p50=self._percentile(index, 0.5),
            kl_p99=self._percentile(index, 0.99),
            kl_max=float(self._kl_max[index]),
            top1_agreement=sums["top1"] / tokens,
            perplexity_full=_perplexity(sums["full_nll"], labels),
            perplexity_fp8=_perplexity(sums["fp8_nll"], labels),
            misranking=Misranking(
                num_pairs=int(tokens) * self._pairs,
                flips=sums["flips"] / max(1, tokens * self._pairs),
                weighted=sums["flipped_gap"] / (sums["gap"] or 1),
                close_flips=sums["close_flips"] / sums["flips"]
                if sums["flips"]
                else None,
            ),
            attention_error=tuple(map(float, np.sqrt(_quotient(error, norm)))),
        )

    def _percentile(self, index: int, share: float) -> float:
        below = np.cumsum(self._histogram[index])
        place = int(np.searchsorted(below, share * below[-1]))
        # The middle of a bin whose ends are 12 % apart, in the logarithm.
        return float(_KL_EDGES[place - 1] * math.sqrt(1.12)) if place else 0.0


_SUMMED = (
    "tokens",
    "kl",
    "top1",
    "labels",
    "full_nll",
    "fp8_nll",
    "flips",
    "close_flips",
    "flipped_gap",
    "gap",
)


def _perplexity(nll: float, num_labels: float) -> float | None:
    if not num_labels:
        return None
    # Beyond this a model predicts nothing, and JSON has no infinity.
    return math.exp(min(nll / num_labels, 700))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


class CurveSums:
    """KL against position under way: bins, and a straight line by least squares."""

    def __init__(
        self, axis: Literal["context", "generated"], edges: tuple[int, ...]
    ) -> None:
        self._axis: Literal["context", "generated"] = axis
        self._edges = edges
        self._bins = np.zeros((3, len(edges) - 1))
        # Tokens, and sums of x, y, x x, x y, y y.
        self._moments = np.zeros(6)

    def add(
        self,
        positions: Int32[np.ndarray, "num_tokens"],
        kl: Float32[np.ndarray, "num_tokens"],
        same_top: Bool[np.ndarray, "num_tokens"],
    ) -> None:
        x, y = positions.astype(np.float64), kl.astype(np.float64)
        bins = np.searchsorted(self._edges, positions, side="right") - 1
        for row, values in enumerate((np.ones_like(y), y, same_top)):
            np.add.at(self._bins[row], bins, values)
        one = np.ones_like(x)
        self._moments += [v.sum() for v in (one, x, y, x * x, x * y, y * y)]

    def report(self) -> PositionCurve:
        count, kl, top1 = self._bins
        slope, error = self._line()
        mean = self._moments[2] / max(1.0, self._moments[0])
        reach = (self._edges[-1] - self._edges[0]) / 1000
        return PositionCurve(
            axis=self._axis,
            edges=self._edges,
            num_tokens=tuple(map(int, count)),
            kl_mean=_means(kl, count),
            top1_agreement=_means(top1, count),
            slope=slope,
            slope_error=error,
            accumulates=slope is not None
            and error is not None
            and bool(slope > 3 * error and slope * reach > 0.2 * mean),
        )

    def _line(self) -> tuple[float | None, float | None]:
        """Slope and its standard error, per 1,000 positions."""
        n, x, y, xx, xy, yy = self._moments
        if n < 8:
            return None, None
        spread = xx - x * x / n
        if spread <= 0:
            return None, None
        slope = (xy - x * y / n) / spread
        residual = max(0.0, (yy - y * y / n) - slope * slope * spread)
        error = math.sqrt(residual / (n - 2) / spread)
        return float(1000 * slope), float(1000 * error)


def _means(total: np.ndarray, count: np.ndarray) -> tuple[float | None, ...]:
    pairs = zip(total, count, strict=True)
    return tuple(float(t / n) if n else None for t, n in pairs)


def position_edges(longest: int) -> tuple[int, ...]:
    """Edges 0, 16, 64, 256, ... that positions below `longest` fall between."""
    edges = [0]
    step = 16
    while step < longest:
        edges.append(step)
        step *= 4
    return (*edges, longest)


class WorstTokens:
    """The tokens with the largest KL so far: a heap of a fixed size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[float, int, WorstToken]] = []
        self._num_offered = 0

    @property
    def least(self) -> float:
        """What a token has to exceed to get in."""
        return self._heap[0][0] if len(self._heap) == self._size else -1.0

    def offer(self, token: WorstToken) -> None:
        self._num_offered += 1
        entry = (token.kl, -self._num_offered, token)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif self._size:
            heapq.heappushpop(self._heap, entry)

    def report(self) -> tuple[WorstToken, ...]:
        return tuple(token for _, _, token in sorted(self._heap, reverse=True))
