"""Plots of a report: time against context length, and percent of the ceiling."""

import importlib.util
import pathlib
from itertools import groupby
from typing import Any

from benchmarks.report import Report, derived


def matplotlib_is_there() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def write_plots(report: Report, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws what the report has rows for.

    Returns:
      The files written: PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    rows = derived(report)
    plots = {"time_against_context": _context, "percent_of_ceiling": _percent}
    written = []
    for name, draw in plots.items():
        figure = draw(rows)
        if figure is not None:
            title = f"{report.device}, {report.date[:10]}"
            figure.axes[0].set_title(title, fontsize=9)
            figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
            written.append(folder / f"{name}.png")
    return written


def _context(rows: list[dict[str, Any]]) -> Any:
    """Time per token against context length, one line per batch size, and its limit."""
    rows = [row for row in rows if row["benchmark"] == "scaling"]
    if not rows:
        return None
    figure, axes = _figure(7.0, 4.5)
    rows = sorted(rows, key=lambda row: (row["num_seqs"], row["context"]))
    for num_seqs, group in groupby(rows, key=lambda row: row["num_seqs"]):
        points = list(group)
        contexts = [row["context"] for row in points]
        times = [row["us_per_token"] for row in points]
        (line,) = axes.plot(contexts, times, marker="o", label=f"batch {num_seqs}")
        limits = [
            row["us_per_token"] * row["percent_of_ceiling"] / 100 for row in points
        ]
        axes.plot(contexts, limits, linestyle="--", color=line.get_color(), alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("us a token, append and attention of all layers")
    axes.legend(title="dashed: bytes / ceiling", fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _percent(rows: list[dict[str, Any]]) -> Any:
    """Percent of the ceiling by case: our kernels, and other libraries in grey."""
    rows = [row for row in rows if "percent_of_ceiling" in row]
    ours = [row for row in rows if _is_ours(row)]
    fast = {(r["op"], r["case"]) for r in ours if r["implementation"] != "xla"}
    # Plain JAX where there is no kernel.
    rows = [
        row
        for row in rows
        if row["implementation"] != "xla" or (row["op"], row["case"]) not in fast
    ]
    if not rows:
        return None
    figure, axes = _figure(8.0, 1.0 + 0.22 * len(rows))
    labels = [
        "  ".join([r["op"], r["case"], *([] if _is_ours(r) else [r["implementation"]])])
        for r in rows
    ]
    bars = axes.barh(
        range(len(rows)),
        [row["percent_of_ceiling"] for row in rows],
        color=["tab:blue" if _is_ours(row) else "silver" for row in rows],
    )
    axes.set_yticks(range(len(rows)), labels)
    axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.margins(y=0.5 / len(rows))
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("% of the ceiling measured in the same run; grey: other libraries")
    return figure


def _is_ours(row: dict[str, Any]) -> bool:
    name = row["implementation"]
    return name in ("mosaic_gpu", "xla") or name.startswith("ours")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
