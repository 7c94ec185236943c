"""The charts of a replay's report, each made of the part of the result that it shows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from fp8kv_jax.drift import report_charts as charts
from fp8kv_jax.drift.result import (
    Attribution,
    PositionCurve,
    QualityReport,
    QualitySlice,
    RangeReport,
    RangeTable,
    ReplayResult,
    Slice,
)

# Columns of one chart; what comes after them stands in the table.
_MOST_COLUMNS = 16
_SCALE_NAMES = {
    "saved": "saved",
    "live_head": "live, by head",
    "live_tensor": "live, by layer",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart, its caption, its legend, and a note on what they leave open."""

    caption: str
    chart: Markup = field(default_factory=Markup)
    legend: Markup = field(default_factory=Markup)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """The largest live amax of a slice, relative to the calibrated one, and where."""

    ratio: float
    layer: int
    head: int


def range_figures(report: RangeReport) -> list[Figure]:
    """Heatmaps layer by head: how far K and V reach, and how much saturates."""
    overall = report.overall
    figures = []
    for name, table, calibrated in (
        ("K", overall.k, report.k_calibrated_amax),
        ("V", overall.v, report.v_calibrated_amax),
    ):

        def say_ratio(row: int, head: int, *, table=table, calibrated=calibrated):
            live, known = table.live_amax[row][head], calibrated[row][head]
            ratio = table.ratio[row][head]
            rest = f"calibrated {_known(known)}, ratio {_known(ratio)}"
            return f"{_where(report, row, head)}: live amax {live:.4g}, {rest}"

        figures.append(
            Figure(
                caption=f"{name}: live over calibrated amax",
                chart=charts.heatmap(
                    table.ratio,
                    charts.RATIOS,
                    name=f"{name}: live over calibrated amax by layer and head",
                    rows=report.layers,
                    title=say_ratio,
                ),
                legend=charts.legend(charts.RATIOS, "live over calibrated amax"),
            )
        )
    for name, table in (("K", overall.k), ("V", overall.v)):
        figures.append(_saturation(report, name, table))
    return figures


def _saturation(report: RangeReport, name: str, table: RangeTable) -> Figure:
    caption = f"{name}: share of values that saturate"
    if not any(map(any, table.saturated)):
        return Figure(caption=caption, note=f"No value of {name} does.")
    num_tokens = report.overall.slice.num_tokens
    num_values = max(1, num_tokens * report.head_dim)

    def say(row: int, head: int) -> str:
        return (
            f"{_where(report, row, head)}: {table.saturated[row][head]:,} of "
            f"{num_values:,} values saturated, in {table.saturated_tokens[row][head]:,} "
            f"of {num_tokens:,} tokens; {table.underflowed[row][head]:,} underflowed, "
            f"{table.nonfinite[row][head]:,} not finite"
        )

    return Figure(
        caption=caption,
        chart=charts.heatmap(
            [[count / num_values for count in row] for row in table.saturated],
            charts.SHARES,
            name=f"{name}: share of saturated values by layer and head, log colours",
            rows=report.layers,
            title=say,
        ),
        legend=charts.legend(charts.SHARES, "share of values, logarithmic"),
    )


def _where(report: RangeReport, row: int, head: int) -> str:
    return f"layer {report.layers[row]}, head {head}"


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def histogram_figures(report: RangeReport) -> list[Figure]:
    """Histograms of K and of V over all heads, then by layer."""
    labels = _bin_labels(report.histogram_edges)
    # The bin that ends at 0 is the last one within the range.
    beyond = 1 + sum(edge <= 0 for edge in report.histogram_edges[:-1])
    figures = []
    tables = (("K", report.overall.k), ("V", report.overall.v))
    for name, table in tables:
        bins = _add(_add(row) for row in table.histogram)
        total = max(1, sum(bins))
        shares = [count / total for count in bins]
        titles = [
            f"{_bin_range(report.histogram_edges, i)}: {count:,} values ({share:.3g})"
            for i, (count, share) in enumerate(zip(bins, shares, strict=True))
        ]
        chart = charts.columns(
            shares,
            name=f"{name}: share of values by octave of the range, logarithmic",
            labels=labels,
            axis="log2 of |x| over the end of the range",
            titles=titles,
            marked=lambda index: index >= beyond,
            is_log=True,
        )
        figures.append(
            Figure(caption=f"{name}: values by octave", chart=chart, note=_BINS)
        )
    return figures + [_by_layer(report, labels, *pair) for pair in tables]


_BINS = (
    "Log scale. The left column is stored as zero; outlined columns lie beyond the end "
    "of the range, where values saturate (all but those that round back to its end)."
)


def _by_layer(
    report: RangeReport, labels: list[str], name: str, table: RangeTable
) -> Figure:
    bins = [_add(row) for row in table.histogram]
    shares = [[count / max(1, sum(row)) for count in row] for row in bins]

    def say(row: int, column: int) -> str:
        octave = _bin_range(report.histogram_edges, column)
        return f"layer {report.layers[row]}, {octave}: {bins[row][column]:,} values"

    chart = charts.heatmap(
        shares,
        charts.SHARES,
        name=f"{name}: share of each layer's values by octave of the range",
        rows=report.layers,
        title=say,
        columns=labels,
        column_name="octave",
        narrow=True,
    )
    shades = charts.legend(charts.SHARES, "share of the layer's values, logarithmic")
    return Figure(
        caption=f"{name}: values by octave and layer", chart=chart, legend=shades
    )


def _add(rows: Iterable[Iterable[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _bin_labels(edges: tuple[float, ...]) -> list[str]:
    return ["zero", *(f"{edge:.0f}" for edge in edges[1:]), f">{edges[-1]:.0f}"]


def _bin_range(edges: tuple[float, ...], index: int) -> str:
    if index == 0:
        return "stored as zero"
    if index == len(edges):
        return f"above 2^{edges[-1]:.0f} of the range"
    return f"2^{edges[index - 1]:.3g} to 2^{edges[index]:.3g} of the range"


def quality_figures(quality: QualityReport) -> list[Figure]:
    """KL and top-1 by class, language, prompt length and position."""
    figures = []
    for dimension, words in (("class", "class"), ("language", "language")):
        chosen = _of_dimension(quality, dimension)[:_MOST_COLUMNS]
        if len(chosen) > 1:
            figures.append(_by_name(chosen, words))
    for dimension, words in (
        ("prompt_length", "prompt length, tokens"),
        ("generation_position", "prompt, then generated token"),
    ):
        chosen = _of_dimension(quality, dimension)
        if len(chosen) > 1:
            figures += _over_places(
                words,
                [x.slice.name for x in chosen],
                [x.kl_mean for x in chosen],
                [x.top1_agreement for x in chosen],
            )
    for curve in quality.curves:
        figures += _over_positions(curve)
    error = charts.lines(
        [charts.Line(name="all tokens", values=quality.overall.attention_error)],
        name="Relative error of the attention output by layer",
        labels=range(len(quality.overall.attention_error)),
        axis="layer",
    )
    figures.append(Figure(caption="Error of the attention output", chart=error))
    return figures


def _of_dimension(quality: QualityReport, dimension: str) -> list[QualitySlice]:
    return [x for x in quality.slices if x.slice.dimension == dimension]


def _by_name(chosen: list[QualitySlice], words: str) -> Figure:
    chart = charts.columns(
        [x.kl_mean for x in chosen],
        name=f"Mean KL by {words}",
        labels=[x.slice.name[:12] for x in chosen],
        axis=words,
        titles=[
            f"{x.slice.name}: KL {x.kl_mean:.3g}, top-1 {x.top1_agreement:.2%}, "
            f"{x.slice.num_tokens:,} tokens"
            for x in chosen
        ],
    )
    return Figure(caption=f"KL by {words}", chart=chart)


def _over_positions(curve: PositionCurve) -> list[Figure]:
    filled = [i for i, number in enumerate(curve.num_tokens) if number]
    if len(filled) < 2:  # no line to draw; the slices have its one figure
        return []
    reached = slice(filled[0], filled[-1] + 1)
    labels = [
        str(low) if high - low == 1 else f"{low}-{high - 1}"
        for low, high in list(zip(curve.edges, curve.edges[1:], strict=False))[reached]
    ]
    words = {
        "context": "position in the sequence",
        "generated": "tokens after the prompt",
    }
    note = ""
    if curve.slope is not None and curve.slope_error is not None:
        grows = "grows" if curve.accumulates else "does not grow"
        note = (
            f"The KL {grows} with position: {curve.slope:+.2g} (standard error "
            f"{curve.slope_error:.1g}) nats per 1,000 tokens."
        )
    values = (curve.kl_mean[reached], curve.top1_agreement[reached])
    return _over_places(words[curve.axis], labels, *values, note=note)


def _over_places(
    words: str,
    labels: Sequence[str],
    kl: Sequence[float | None],
    top1: Sequence[float | None],
    *,
    note: str = "",
) -> list[Figure]:
    known = [x for x in top1 if x is not None]
    lowest = min(0.9, int(min(known, default=0) * 10) / 10)
    return [
        Figure(
            caption=f"KL by {words}",
            chart=charts.lines(
                [charts.Line(name="KL", values=kl)],
                name=f"Mean KL, nats, by {words}",
                labels=labels,
                axis=words,
            ),
            note=note,
        ),
        Figure(
            caption=f"Top-1 agreement by {words}",
            chart=charts.lines(
                [charts.Line(name="top-1", values=top1)],
                name=f"Top-1 agreement by {words}",
                labels=labels,
                axis=words,
                lowest=lowest,
                text=lambda x: f"{100 * x:.4g}%",
            ),
        ),
    ]


def error_figure(result: ReplayResult) -> Figure:
    """Error of each layer's attention output by head, errors of earlier layers in it."""
    assert result.quality is not None
    cells = result.quality.attention_error
    return Figure(
        caption="Error of the attention output by head",
        chart=charts.heatmap(
            cells,
            charts.ERRORS,
            name="Relative error of the attention output by layer and head",
            rows=range(len(cells)),
            title=lambda row, head: (
                f"layer {row}, head {head}: relative error {cells[row][head]:.4g}"
            ),
        ),
        legend=charts.legend(charts.ERRORS, "relative error, logarithmic"),
    )


def attribution_figures(attribution: Attribution) -> list[Figure]:
    """KL with FP8 in one layer alone; errors that rounding alone makes."""
    layers = attribution.layers
    alone = charts.columns(
        [max(0.0, x.kl_mean) for x in layers],
        name="Mean KL with FP8 in one layer alone, by layer",
        labels=[x.layer for x in layers],
        axis="layer",
        titles=[
            f"layer {x.layer}: KL {x.kl_mean:.3g}, {x.share:.1%} of the sum over layers"
            for x in layers
        ],
        marked=lambda index: layers[index].layer in attribution.recommended,
    )
    local = charts.lines(
        [
            charts.Line(name=_SCALE_NAMES[x.name], values=x.local_attention_error)
            for x in attribution.scales
        ],
        name="Error of each layer's attention output on full-precision inputs",
        labels=[x.layer for x in layers],
        axis="layer",
    )
    return [
        Figure(
            caption="KL with FP8 in one layer alone",
            chart=alone,
            note="Outlined: layers recommended for high precision."
            if attribution.recommended
            else "",
        ),
        Figure(
            caption="Error that rounding makes in each layer by itself",
            chart=local,
            note="Inputs of each layer are the full-precision run's own.",
        ),
    ]


def slice_rows(
    result: ReplayResult,
) -> Iterator[tuple[Slice, int, Extreme | None, Extreme | None, QualitySlice | None]]:
    """Each slice with tokens: its saturated values, extremes of K and V, and quality."""
    scored = {}
    if result.quality is not None:
        scored = {(x.slice.dimension, x.slice.name): x for x in result.quality.slices}
    for part in result.range.slices:
        if part.slice.num_tokens:
            saturated = sum(sum(map(sum, t.saturated)) for t in (part.k, part.v))
            k, v = (_extreme(result.range, t) for t in (part.k, part.v))
            quality = scored.get((part.slice.dimension, part.slice.name))
            yield part.slice, saturated, k, v, quality


def _extreme(report: RangeReport, table: RangeTable) -> Extreme | None:
    known = [
        (ratio, layer, head)
        for layer, row in zip(report.layers, table.ratio, strict=True)
        for head, ratio in enumerate(row)
        if ratio is not None
    ]
    if not known:
        return None
    ratio, layer, head = max(known)
    return Extreme(ratio=ratio, layer=layer, head=head)
