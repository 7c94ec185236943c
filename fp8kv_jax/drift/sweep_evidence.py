"""What each calibration window of an order of traffic would have seen."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64, UInt16

from fp8kv_jax.calibration import Granularity
from fp8kv_jax.drift.sweep_grid import AMAX, REST, Grid, Order, percentage_of
from fp8kv_jax.drift.sweep_statistics import (
    BLOCK_TOKENS,
    NUM_FINITE,
    histogram,
    magnitudes,
    value_of,
)
from fp8kv_jax.drift.trace import Trace, TraceText

type Ranges = Float32[np.ndarray, "2 num_layers groups"]
type TokenAmax = UInt16[np.ndarray, "2 num_tokens num_layers num_kv_heads"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a window saw until it was complete.

    Attributes:
      frozen_at: tokens observed by then.
      ranges: by rule and granularity, the magnitude that scales are made from.
    """

    frozen_at: int
    ranges: dict[tuple[str, Granularity], Ranges]


def arrange(
    texts: Sequence[TraceText], order: Order, held_out: Sequence[str], seed: int | None
) -> list[TraceText]:
    """Puts the texts of an order one after another."""
    others = {t.data_class for t in texts} - set(order) - set(held_out)
    # Strings seed by their bytes: the same on any machine.
    shuffled = random.Random(f"{seed}")
    arranged: list[TraceText] = []
    for name in order:
        wanted = others if name == REST else {name}
        part = [text for text in texts if text.data_class in wanted]
        if seed is not None:
            shuffled.shuffle(part)
        arranged += part
    return arranged


def freeze_points(
    texts: Sequence[TraceText], chunk: int, windows: Sequence[int]
) -> dict[int, int | None]:
    """Says after how many tokens each window is complete: the batch counts whole."""
    points: dict[int, int | None] = dict.fromkeys(windows)
    seen, waiting = 0, sorted(set(windows))
    for text in texts:
        for start in range(0, text.num_tokens, chunk):
            if not waiting:
                return points
            end = seen + min(start + chunk, text.num_tokens)
            while waiting and waiting[0] <= end:
                points[waiting.pop(0)] = end
        seen += text.num_tokens
    return points


def observe_order(
    trace: Trace,
    token_amax: Mapping[str, TokenAmax],
    texts: Sequence[TraceText],
    grid: Grid,
    chunk: int,
) -> dict[int, Evidence | None]:
    """Observes texts in their order, up to the freeze of each window of a grid.

    Args:
      trace: read again, as far as the windows reach, if a rule is a percentile.
      token_amax: of the survey.
      texts: as arranged.
      grid: windows, rules and granularities.
      chunk: tokens of the largest batch.

    Returns:
      By window; None for a window that the texts do not fill.
    """
    points = freeze_points(texts, chunk, grid.windows)
    ends = sorted({end for end in points.values() if end is not None})
    found: dict[int, dict[tuple[str, Granularity], Ranges]] = {end: {} for end in ends}
    percentages = {rule: percentage_of(rule) for rule in grid.rules}
    if AMAX in percentages:
        for end, amax in _running_amax(token_amax, texts, ends).items():
            for granularity in grid.granularities:
                found[end][AMAX, granularity] = _by_group(amax, granularity)
    others = {rule: p for rule, p in percentages.items() if p is not None}
    if others:
        for end, counts in _running_counts(trace, texts, ends):
            for granularity in grid.granularities:
                for rule, p in others.items():
                    found[end][rule, granularity] = _percentile(counts, p, granularity)
    return {
        window: None if end is None else Evidence(frozen_at=end, ranges=found[end])
        for window, end in points.items()
    }


def _running_amax(
    token_amax: Mapping[str, TokenAmax],
    texts: Sequence[TraceText],
    ends: Sequence[int],
) -> dict[int, np.ndarray]:
    """The amax [2, num_layers, num_kv_heads] of the first `end` tokens, for each."""
    running, found, seen, waiting = None, {}, 0, list(ends)
    for text in texts:
        rows, done = token_amax[text.name], 0
        while waiting and waiting[0] <= seen + text.num_tokens:
            end = waiting.pop(0)
            running = _largest(running, rows[:, done : end - seen])
            done = end - seen
            found[end] = value_of(running)
        if not waiting:
            break
        running = _largest(running, rows[:, done:])
        seen += text.num_tokens
    return found


def _largest(running: np.ndarray | None, rows: TokenAmax) -> np.ndarray:
    new = rows.max(axis=1, initial=0)
    return new if running is None else np.maximum(running, new)


def _by_group(amax: np.ndarray, granularity: Granularity) -> Ranges:
    return amax if granularity == "head" else amax.max(axis=2, keepdims=True)


def _running_counts(trace: Trace, texts: Sequence[TraceText], ends: Sequence[int]):
    """Yields `(end, counts)` for ascending ends; the counts go on changing."""
    shape = (2, trace.shape.num_layers, trace.shape.num_kv_heads, 1 << 15)
    counts = np.zeros(shape, np.int64)
    seen, waiting = 0, list(ends)
    for text in texts:
        start = 0
        while waiting and start < text.num_tokens:
            stop = min(waiting[0] - seen, text.num_tokens, start + BLOCK_TOKENS)
            for which, rows in enumerate(trace.rows(text.name, start, stop)):
                counts[which] += histogram(magnitudes(rows))
            start = stop
            if seen + stop == waiting[0]:
                yield waiting.pop(0), counts
        seen += text.num_tokens


def _percentile(
    counts: Int64[np.ndarray, "2 num_layers num_kv_heads 32768"],
    percentage: float,
    granularity: Granularity,
) -> Ranges:
    """The smallest magnitude that so much of the nonzero finite values do not exceed."""
    finite = counts[..., 1:NUM_FINITE]
    if granularity == "tensor":
        finite = finite.sum(axis=2, keepdims=True)
    below = finite.cumsum(axis=-1)
    wanted = np.ceil(below[..., -1:] * (percentage / 100))
    # Pattern 0 is zero: a group without a nonzero value has no range.
    first = 1 + (below >= np.maximum(wanted, 1)).argmax(axis=-1)
    return value_of(np.where(below[..., -1] > 0, first, 0).astype(np.uint16))
