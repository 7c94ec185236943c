"""What `fp8kv replay` says when it is done: tables, JSON, or a page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8kv_jax.cli.errors import UserError
from fp8kv_jax.drift.policy import slice_name
from fp8kv_jax.drift.result import (
    Attribution,
    Check,
    FormatReport,
    QualityReport,
    ReplayResult,
)
from fp8kv_jax.drift.result_quality import alike

# A file has no edge that a table should be squeezed to.
_FILE_WIDTH = 140
# Other scales that the attribution's sample was run with.
_SCALES = {
    "live_head": "one scale a head of this traffic",
    "live_tensor": "one scale a layer of this traffic",
}
_MOST_FLAGS, _MOST_LAYERS, _MOST_WORST = 12, 6, 5


def show(result: ReplayResult, *, as_json: bool) -> None:
    """Prints one JSON object to stdout, or tables to stderr."""
    if as_json:
        print(result.to_json())
        return
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    console.print(_slices_table(result))
    for flag in result.range.flags[:_MOST_FLAGS]:
        say(f"{flag.kind}: {flag.words}")
    if len(result.range.flags) > _MOST_FLAGS:
        say(f"... and {len(result.range.flags) - _MOST_FLAGS} more flags")
    if result.quality is not None:
        for line in _quality_lines(result.quality):
            say(line)
    if result.generated is not None:
        console.print(_generated_table(result))
    if result.drifts is not None:
        say(result.drifts.words)
    if result.attribution is not None:
        console.print(_layers_table(result.attribution))
        say(result.attribution.recommendation)
    if result.formats is not None:
        console.print(_formats_table(result.formats))
    say(_capacity_line(result))
    for line in _verdict_lines(result.verdict.checks):
        say(line)
    say(f"{result.verdict.verdict}: {result.verdict.envelope}")


def _verdict_lines(checks: Sequence[Check]) -> Iterator[str]:
    """What failed and what is noted, a line each; then all that was skipped."""
    for check in checks:
        if check.outcome in ("failed", "note"):
            yield f"{check.outcome}: {check.words}"
    few = [check for check in checks if check.outcome == "skipped"]
    if few:
        names = ", ".join(f"{check.slice} ({check.value:,.0f})" for check in few)
        yield f"skipped: fewer than {few[0].limit:,.0f} tokens: {names}"


def _slices_table(result: ReplayResult) -> Table:
    headers = ["slice", "tokens", "saturated", "K ratio", "V ratio"]
    if result.quality is not None:
        headers += ["KL", "KL p99", "top-1", "perplexity", "FP8's"]
    table = Table(*headers, box=box.SIMPLE)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    scored = {}
    if result.quality is not None:
        scored = {slice_name(x.slice): x for x in result.quality.slices}
    for ranges in result.range.slices:
        if not ranges.slice.num_tokens:
            continue
        name = slice_name(ranges.slice)
        saturated = sum(sum(map(sum, t.saturated)) for t in (ranges.k, ranges.v))
        ratios = (_largest(t.ratio) for t in (ranges.k, ranges.v))
        row = [f"{ranges.slice.num_tokens:,}", f"{saturated:,}", *ratios]
        if name in scored:
            x = scored[name]
            row += [f"{x.kl_mean:.3g}", f"{x.kl_p99:.3g}", f"{x.top1_agreement:.2%}"]
            pair = (x.perplexity_full, x.perplexity_fp8)
            row += ["-" if value is None else f"{value:.4g}" for value in pair]
        table.add_row(Text(name), *row)
    return table


def _largest(ratios: tuple[tuple[float | None, ...], ...]) -> str:
    known = [x for row in ratios for x in row if x is not None]
    return f"{max(known):.2f}" if known else "-"


def _quality_lines(quality: QualityReport) -> list[str]:
    mis = quality.overall.misranking
    close = "-" if mis.close_flips is None else f"{mis.close_flips:.0%}"
    lines = [
        f"neighbours among the likeliest: {mis.flips:.2%} changed places "
        f"({close} of these close calls), {mis.weighted:.2%} by gap"
    ]
    for curve in quality.curves:
        if curve.slope is not None and curve.slope_error is not None:
            grows = "grows" if curve.accumulates else "does not grow"
            lines.append(
                f"KL over {curve.axis} positions {grows}: {curve.slope:+.2g} +- "
                f"{curve.slope_error:.1g} nats per 1,000 tokens"
            )
    for token, more in alike(quality.worst_tokens)[:_MOST_WORST]:
        where = f"{token.sample} and {more} more" if more else token.sample
        lines.append(
            f"worst: KL {token.kl:.3g} in {where} at token {token.position}: "
            f"...{token.context[-40:]!r} -> full precision {token.full_top!r} "
            f"{token.full_probability:.0%}, FP8 {token.fp8_top!r} "
            f"{token.fp8_probability:.0%}"
        )
    return lines


def _generated_table(result: ReplayResult) -> Table:
    assert result.generated is not None
    headers = ("outputs", "prompts", "equal", "first difference", "right", "FP8's")
    table = Table(*headers, box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for part in result.generated.slices:
        first = part.first_divergence_p50
        accuracy = (part.accuracy_full, part.accuracy_fp8)
        table.add_row(
            Text(part.name),
            str(part.num_prompts),
            f"{part.exact_match:.0%}",
            "-" if first is None else f"token {first} (median)",
            *("-" if x is None else f"{x:.0%}" for x in accuracy),
        )
    return table


def _layers_table(attribution: Attribution) -> Table:
    table = Table("FP8 in", "KL", "share", "top-1", box=box.SIMPLE)
    table.title = f"Attribution, {_size(attribution)}"
    for column in table.columns[1:]:
        column.justify = "right"
    whole = (f"{attribution.kl_mean:.3g}", "", f"{attribution.top1_agreement:.2%}")
    table.add_row("all layers", *whole)
    costly = sorted(attribution.layers, key=lambda x: -x.kl_mean)[:_MOST_LAYERS]
    for x in costly:
        figures = (f"{x.kl_mean:.3g}", f"{x.share:.0%}", f"{x.top1_agreement:.2%}")
        table.add_row(f"layer {x.layer}", *figures)
    for x in attribution.trials:
        name = f"all but {','.join(map(str, x.layers))}"
        table.add_row(name, f"{x.kl_mean:.3g}", "", f"{x.top1_agreement:.2%}")
    for x in attribution.scales[1:]:
        name = f"all, {_SCALES[x.name]}"
        table.add_row(name, f"{x.kl_mean:.3g}", "", f"{x.top1_agreement:.2%}")
    return table


def _formats_table(report: FormatReport) -> Table:
    headers = (
        "format",
        "KL",
        "top-1",
        "attention error (worst layer)",
        "bytes/token",
        "metadata",
    )
    table = Table(*headers, box=box.SIMPLE)
    table.title = f"Formats, {_size(report)}"
    for column in table.columns[1:]:
        column.justify = "right"
    for x in report.trials:
        errors = x.local_attention_error
        metadata = f"{x.metadata_bytes_per_token:,}"
        if x.fixed_metadata_bytes:
            metadata = f"{x.fixed_metadata_bytes:,} in all"
        table.add_row(
            x.name,
            f"{x.kl_mean:.3g}",
            f"{x.top1_agreement:.2%}",
            f"{sum(errors) / len(errors):.2%} ({max(errors):.2%})",
            f"{x.bytes_per_token:,}",
            metadata,
        )
    return table


def _size(sample: Attribution | FormatReport) -> str:
    return f"{sample.num_tokens:,} tokens of {sample.num_samples} samples"


def _capacity_line(result: ReplayResult) -> str:
    capacity = result.capacity
    fp8, bf16 = capacity.fp8, capacity.bf16
    return (
        f"cache: {fp8.total:,} bytes (pages {fp8.pages:,}, of them unused ends "
        f"{fp8.page_end_waste:,}; scales {fp8.scales:,}; block tables "
        f"{fp8.block_tables:,}) against {bf16.total:,} in BF16 "
        f"({capacity.saved_share:.1%} less); {fp8.bytes_per_token:,} against "
        f"{bf16.bytes_per_token:,} a token"
    )


def write_page(result: ReplayResult, path: Path) -> None:
    """Writes everything as one HTML file, and the result as JSON beside it.

    Raises:
      UserError: if it cannot be written.
    """
    # Here: nothing else needs the templates.
    from fp8kv_jax.drift.report import write_report

    try:
        write_report(result, path)
    except OSError as error:
        raise UserError(f"Expected to write {path}: {error.strerror}.") from error
