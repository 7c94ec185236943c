"""A sweep: which scales would each calibration window have frozen, and do they fit?

One pass over a recorded trace serves all settings. The scales are those of the online
calibration to the last bit: the batch that reaches the window counts as a whole, so
how texts are cut into batches is part of a setting, and a text's end ends a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int64

from fp8kv_jax.calibration import CalibrationConfig, scale_of
from fp8kv_jax.drift.sweep_evidence import (
    Evidence,
    Ranges,
    arrange,
    observe_order,
)
from fp8kv_jax.drift.sweep_grid import REST, Grid, Order, Setting
from fp8kv_jax.drift.sweep_statistics import NUMBER_FORMATS, Survey, take_survey
from fp8kv_jax.drift.trace import Trace
from pallas_kernels.fp8 import FP8_MAX

_PROVISIONAL = CalibrationConfig().provisional_scale


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What writing some text at a setting's scales does.

    Attributes:
      num_tokens: tokens of the text.
      saturated, underflowed: values, by K and V and layer.
      relative_error: root mean square of the error over that of the values.
    """

    num_tokens: int
    saturated: Int64[np.ndarray, "2 num_layers"]
    underflowed: Int64[np.ndarray, "2 num_layers"]
    relative_error: Float32[np.ndarray, "2 num_layers"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a setting comes to.

    Attributes:
      setting: the point of the grid.
      frozen_at: tokens observed when the scales froze; None if the order is shorter
        than the window: the scales are the provisional ones then.
      scales: of K and of V.
      no_signal: groups that saw only zeros and keep the provisional scale.
      written: all text of the order. The freeze rewrites what came before it, so all
        of it stands at these scales.
      held_out: by class, text that is not in the order.
      staged_bytes: memory of the window's BF16 rows, owners of slots apart.
    """

    setting: Setting
    frozen_at: int | None
    scales: Float32[np.ndarray, "2 num_layers groups"]
    no_signal: np.ndarray
    written: Loss
    held_out: dict[str, Loss]
    staged_bytes: int


def run_sweep(
    trace: Trace,
    grid: Grid,
    *,
    held_out: Sequence[str] = (),
    advance: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    """Runs all settings of a grid over a trace.

    Args:
      trace: the recorded keys and values.
      grid: with orders from `resolve_orders`.
      held_out: classes that no `*` stands for.
      advance: told how many tokens of the trace were read.

    Returns:
      Outcomes in the order of `grid.settings`.
    """
    max_rows = max(grid.windows) + max(grid.chunks)
    survey = take_survey(trace, max_rows=max_rows, advance=advance)
    observed: dict[tuple, dict[int, Evidence | None]] = {}
    losses: dict[tuple, tuple[Loss, dict[str, Loss]]] = {}
    outcomes = []
    for setting in grid.settings():
        traffic = (setting.order, setting.seed, setting.chunk)
        if traffic not in observed:
            texts = arrange(trace.texts, setting.order, held_out, setting.seed)
            observed[traffic] = observe_order(
                trace, survey.token_amax, texts, grid, setting.chunk
            )
        evidence = observed[traffic][setting.window]
        scales, no_signal = _freeze(setting, evidence, trace)
        written = _classes_of(trace, setting.order, held_out)
        # Windows that freeze to the same scales are measured once.
        key = (written, setting.number_format, scales.shape, scales.tobytes())
        if key not in losses:
            losses[key] = _measure(trace, survey, written, setting, scales)
        outcomes.append(
            Outcome(
                setting=setting,
                frozen_at=evidence.frozen_at if evidence else None,
                scales=scales,
                no_signal=no_signal,
                written=losses[key][0],
                held_out=losses[key][1],
                staged_bytes=_staged_bytes(setting, trace),
            )
        )
    return outcomes


def _freeze(
    setting: Setting, evidence: Evidence | None, trace: Trace
) -> tuple[Ranges, Bool[np.ndarray, "2 num_layers groups"]]:
    """Makes a setting's scales as the freeze does; says which rest on zeros alone."""
    largest = NUMBER_FORMATS[setting.number_format].largest
    # Covers +-896 in any format.
    provisional = np.float32(_PROVISIONAL * FP8_MAX / largest)
    if evidence is None:
        groups = trace.shape.num_kv_heads if setting.granularity == "head" else 1
        shape = (2, trace.shape.num_layers, groups)
        return np.full(shape, provisional), np.zeros(shape, bool)
    ranges = evidence.ranges[setting.rule, setting.granularity]
    # As `scale_per_amax` makes it, for a format of any range.
    per_amax = np.float32(setting.headroom / largest)
    has_signal = ranges > 0
    return np.where(has_signal, scale_of(ranges, per_amax), provisional), ~has_signal


def _classes_of(trace: Trace, order: Order, held_out: Sequence[str]) -> Order:
    def is_written(name: str) -> bool:
        return name in order or (REST in order and name not in held_out)

    return tuple(filter(is_written, trace.classes))


def _measure(
    trace: Trace, survey: Survey, written: Order, setting: Setting, scales: Ranges
) -> tuple[Loss, dict[str, Loss]]:
    """Measures the text of an order as one, and each other class by itself."""

    def loss(*classes: str) -> Loss:
        tally = survey.histogram(classes).tally(
            scales, NUMBER_FORMATS[setting.number_format]
        )
        texts = [text for text in trace.texts if text.data_class in classes]
        return Loss(
            num_tokens=sum(text.num_tokens for text in texts),
            saturated=tally.saturated.sum(axis=2),
            underflowed=tally.underflowed.sum(axis=2),
            relative_error=tally.relative_error().astype(np.float32),
        )

    others = [name for name in trace.classes if name not in written]
    return loss(*written), {name: loss(name) for name in others}


def _staged_bytes(setting: Setting, trace: Trace) -> int:
    """Memory of a window's rows: as many as a crossing batch may need."""
    shape = trace.shape
    bytes_per_row = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return (setting.window - 1 + setting.chunk) * bytes_per_row
