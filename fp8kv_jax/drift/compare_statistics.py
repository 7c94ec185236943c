"""Intervals for a comparison: the paired bootstrap over prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

LEVEL = 0.95

type Change = Literal["difference", "relative"]
# Makes of sums over prompts, `[..., columns]`, a figure of A and one of B.
type Metric = Callable[[Float64[np.ndarray, "*draws columns"]], tuple]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure, and the interval that covers the true one with 95 % probability.

    The interval is None where a figure is exact.
    """

    value: float
    low: float | None = None
    high: float | None = None


def paired_bootstrap(
    rows: Float64[np.ndarray, "num_rows columns"],
    metric: Metric,
    *,
    change: Change,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[Estimate, Estimate, Estimate]:
    """Estimates a figure of A, of B, and the change from A to B.

    Rows are drawn with replacement, each with what both did on it: a prompt that is
    hard for both widens neither's advantage. Percentile intervals.

    Args:
      rows: what is summed up, of one prompt or one round of prompts each.
      metric: makes the two figures of sums over rows.
      change: "difference" is B - A, "relative" is B / A - 1.
      draws: how often rows are drawn anew.
      seed: what the draws depend on.

    References:
      Efron and Tibshirani, An Introduction to the Bootstrap, 1993.
    """
    num_rows = len(rows)
    rng = np.random.default_rng(seed)
    times_drawn = rng.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=draws)
    spread = _figures(metric(times_drawn @ rows), change)
    values = _figures(metric(rows.sum(axis=0)), change)
    ends = np.quantile(spread, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=1)
    a, b, changed = (
        Estimate(value=float(value), low=float(low), high=float(high))
        for value, low, high in zip(values, *ends, strict=True)
    )
    return a, b, changed


def _figures(pair: tuple, change: Change) -> np.ndarray:
    a, b = map(np.asarray, pair)
    return np.stack([a, b, b - a if change == "difference" else b / a - 1])
