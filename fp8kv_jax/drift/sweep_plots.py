"""Figures of a sweep, against the window: scales, saturation, quality, memory."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8kv_jax.drift.sweep import Outcome
from fp8kv_jax.drift.sweep_grid import Setting
from fp8kv_jax.drift.sweep_quality import Quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

type Qualities = Sequence[Mapping[str, Quality] | None]

# Told apart also by those who see few colours (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_NAMES = {"seed": "order_seed", "number_format": "format"}


def varying_fields(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Names the fields that settings differ in, the window apart."""
    return tuple(
        _NAMES.get(field.name, field.name)
        for field in dataclasses.fields(Setting)
        if field.name != "window"
        and len({getattr(setting, field.name) for setting in settings}) > 1
    )


def total_saturated(outcome: Outcome, *, held_out: bool) -> int | None:
    """Saturated values of what was written, or of what was held out if anything was."""
    losses = list(outcome.held_out.values()) if held_out else [outcome.written]
    return sum(int(x.saturated.sum()) for x in losses) if losses else None


def draw_figures(outcomes: Sequence[Outcome], quality: Qualities) -> dict[str, bytes]:
    """Draws PNG files by name; the one of quality only if any was measured.

    Raises:
      ImportError: without matplotlib.
    """
    lines, legend = _lines(outcomes)
    figures = {
        "scale_against_window.png": _draw_scales(lines, legend, outcomes),
        "saturation_against_window.png": _draw_saturation(lines, legend, outcomes),
        "memory_against_window.png": _draw_memory(outcomes),
    }
    if any(q is not None for q in quality):
        figures["quality_against_window.png"] = _draw_quality(
            lines, legend, outcomes, quality
        )
    return {name: _png(figure) for name, figure in figures.items()}


type _Style = dict[str, Any]
# What a legend names, and how it looks.
type _Legend = dict[str, _Style]


class _Line(NamedTuple):
    """Outcomes that differ in their window alone, and how to draw them."""

    members: list[int]
    style: _Style


def _lines(outcomes: Sequence[Outcome]) -> tuple[list[_Line], _Legend]:
    """Groups outcomes: a colour for each order, a stroke for whatever else differs.

    With one order the colours tell what differs. Lines of several seeds look the same.
    """
    varying = varying_fields([outcome.setting for outcome in outcomes])
    members: dict[Setting, list[int]] = {}
    for index, outcome in enumerate(outcomes):
        line = dataclasses.replace(outcome.setting, window=1)
        members.setdefault(line, []).append(index)
    colours: _Legend = {}
    strokes: _Legend = {}
    lines = []
    for line, indices in members.items():
        order = ", ".join(line.order).replace("*", "the rest")
        other = _describe(line, varying)
        if "order" not in varying and other:
            order, other = other, ""
        hue, stroke = len(colours), len(strokes)
        colours.setdefault(
            order,
            {
                "color": _COLOURS[hue % len(_COLOURS)],
                "marker": _MARKERS[hue % len(_MARKERS)],
                "markerfacecolor": "none",
            },
        )
        strokes.setdefault(
            other, {"color": "grey", "linestyle": _STYLES[stroke % len(_STYLES)]}
        )
        style = {**strokes[other], **colours[order]}
        style["alpha"] = 0.9 if line.seed is None else 0.6
        lines.append(_Line(indices, style))
    return lines, colours | (strokes if len(strokes) > 1 else {})


def _describe(line: Setting, varying: Sequence[str]) -> str:
    parts = {
        "chunk": f"chunk {line.chunk}",
        "granularity": line.granularity,
        "headroom": f"headroom {line.headroom:g}",
        "rule": line.rule,
        "format": line.number_format,
    }
    return ", ".join(text for name, text in parts.items() if name in varying)


def _frozen(line: _Line, outcomes: Sequence[Outcome]) -> list[Outcome]:
    found = [outcomes[i] for i in line.members if outcomes[i].frozen_at is not None]
    return sorted(found, key=lambda outcome: outcome.setting.window)


def _draw_scales(
    lines: Sequence[_Line], legend: _Legend, outcomes: Sequence[Outcome]
) -> "Figure":
    figure, axes = _axes(2, legend)
    largest: dict[Any, np.ndarray] = {}
    for outcome in outcomes:
        kind = _comparable(outcome)
        if outcome.frozen_at is not None:
            so_far = largest.get(kind, outcome.scales)
            largest[kind] = np.maximum(so_far, outcome.scales)
    for line in lines:
        found = _frozen(line, outcomes)
        if not found:
            continue
        windows = [outcome.setting.window for outcome in found]
        ratios = np.stack([x.scales / largest[_comparable(x)] for x in found])
        for which, ax in enumerate(axes):
            by_group = ratios[:, which].reshape(len(found), -1)
            ax.plot(windows, np.median(by_group, axis=1), **line.style)
            low: dict[str, Any] = {**line.style, "marker": None, "linewidth": 0.8}
            ax.plot(windows, by_group.min(axis=1), **low)
    for ax, name in zip(axes, "KV", strict=True):
        ax.set_title(f"scales of {name}")
        ax.set_ylim(0, 1.05)
    axes[0].set_ylabel(
        "share of the largest frozen scale\n(thick: median, thin: least)"
    )
    return _finish(figure, axes, legend)


def _comparable(outcome: Outcome) -> tuple:
    setting = outcome.setting
    return setting.granularity, setting.headroom, setting.rule, setting.number_format


def _draw_saturation(
    lines: Sequence[_Line], legend: _Legend, outcomes: Sequence[Outcome]
) -> "Figure":
    has_held_out = any(outcome.held_out for outcome in outcomes)
    figure, axes = _axes(1 + has_held_out, legend)
    for ax, held_out in zip(axes, (False, True), strict=False):
        for line in lines:
            found = [x for x in _frozen(line, outcomes) if x.held_out or not held_out]
            windows = [outcome.setting.window for outcome in found]
            counts = [total_saturated(x, held_out=held_out) or 0 for x in found]
            ax.plot(windows, counts, **line.style)
        ax.set_title("held-out text" if held_out else "text of the order itself")
        # Linear to 1, so that none is a place of its own.
        ax.set_yscale("symlog", linthresh=1)
        ax.set_ylim(bottom=-0.1)
    axes[0].set_ylabel("saturated values")
    return _finish(figure, axes, legend)


def _draw_quality(
    lines: Sequence[_Line],
    legend: _Legend,
    outcomes: Sequence[Outcome],
    quality: Qualities,
) -> "Figure":
    figure, axes = _axes(2, legend)
    for line in lines:
        found = [i for i in line.members if quality[i] is not None]
        found = [i for i in found if outcomes[i].frozen_at is not None]
        windows = [outcomes[i].setting.window for i in found]
        overall = [q["all"] for q in (quality[i] for i in found) if q is not None]
        if not overall:
            continue
        style: dict[str, Any] = {**line.style, "capsize": 3, "elinewidth": 0.8}
        kl, error = np.array([(q.kl, q.kl_error) for q in overall]).T
        axes[0].errorbar(windows, kl, error, **style)
        top1, error = 100 * np.array([(q.top1, q.top1_error) for q in overall]).T
        axes[1].errorbar(windows, top1, error, **style)
    axes[0].set_ylabel("KL(full precision || FP8), nats a token")
    axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])
    axes[0].set_title("KL, with its standard error")
    axes[1].set_ylabel("same likeliest next token, %")
    axes[1].set_title("top-1 agreement, with its standard error")
    return _finish(figure, axes, legend)


def _draw_memory(outcomes: Sequence[Outcome]) -> "Figure":
    by_chunk: dict[int, dict[int, int]] = {}
    for outcome in outcomes:
        setting = outcome.setting
        by_chunk.setdefault(setting.chunk, {})[setting.window] = outcome.staged_bytes
    looks = [
        {"color": colour, "marker": marker}
        for colour, marker in zip(_COLOURS, _MARKERS, strict=True)
    ]
    legend: _Legend = {
        f"chunk {chunk}": looks[i % len(looks)] for i, chunk in enumerate(by_chunk)
    }
    figure, axes = _axes(1, legend)
    for sizes, look in zip(by_chunk.values(), legend.values(), strict=True):
        windows = sorted(sizes)
        axes[0].plot(windows, [sizes[window] / 2**20 for window in windows], **look)
    axes[0].set_ylabel("staged BF16 rows, MiB")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes[0].set_title("memory that the window holds until the freeze")
    return _finish(figure, axes, legend)


def _axes(number: int, legend: _Legend) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    height = 3.6 + 0.25 * -(-len(legend) // number)
    figure = Figure(figsize=(5.2 * number + 0.6, height), layout="constrained")
    return figure, list(figure.subplots(1, number, squeeze=False)[0])


def _finish(figure: "Figure", axes: "Sequence[Axes]", legend: _Legend) -> "Figure":
    from matplotlib.lines import Line2D

    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        ax.set_xlabel("window, tokens")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[Line2D([], [], label=name, **look) for name, look in legend.items()],
        loc="outside lower center",
        ncols=len(axes),
        frameon=False,
    )
    return figure


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
