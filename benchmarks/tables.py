"""Results as tables: on a terminal, and as Markdown for a README."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.table import Table

from benchmarks.compare import Change
from benchmarks.report import Report, derived, microseconds

COLUMNS = (
    "op",
    "case",
    "implementation",
    "us",
    "p10 to p90",
    "GB/s",
    "TFLOP/s",
    "% of ceiling",
    "x BF16",
    "x XLA",
    "more",
)
_FIRST_NUMBER = COLUMNS.index("us")
# What a row says beyond the columns, and how it is written.
MORE = {
    "relative_error": "error {:.1e}",
    "device_us": "device {:,.0f} us",
    "over_limit": "{:.3f} x limit",
    "kv_over_limit": "append + attention {:.3f} x KV limit",
    "over_plain": "{:.3f} x without",
    "over_frozen": "{:.3f} x frozen",
    "dispatch_us": "host {:,.0f} us",
    "num_kernels": "{} kernels",
    "window_us": "whole window + {:,.0f} us",
    "staged_bytes": "staged {:,.0f} bytes",
    "us_per_token": "{:,.2f} us a token",
}


def title(report: Report) -> str:
    """One line: the device, the versions, the commit and the date."""
    parts = [report.device]
    if report.driver:
        parts.append(f"driver {report.driver}")
    parts += [f"{name} {version}" for name, version in report.versions.items()]
    parts.append(f"commit {report.commit}" if report.commit else "no commit")
    return ", ".join([*parts, report.date])


def ceilings(report: Report) -> str:
    """One line: what the percentages are of."""
    return (
        f"Ceilings in the same run: copy {_short(report.ceilings['gb_per_s'])} GB/s, "
        "read and written; BF16 product "
        f"{_short(report.ceilings['tflop_per_s'])} TFLOP/s."
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A row of `derived` in the order of COLUMNS; empty where it says nothing."""

    def number(name: str, form: str | None = None) -> str:
        if name not in row:
            return ""
        return form.format(row[name]) if form else _short(row[name])

    spread = ""
    if row.get("samples", 1) > 1:
        spread = f"{_short(row['p10_us'])} to {_short(row['p90_us'])}"
    own = "device_us" if "wall_us" not in row else None
    more = [form.format(row[n]) for n, form in MORE.items() if n in row and n != own]
    return [
        row["op"],
        row["case"],
        row["implementation"],
        _short(microseconds(row)),
        spread,
        number("gb_per_s"),
        number("tflop_per_s"),
        number("percent_of_ceiling", "{:.0f}"),
        number("times_bf16", "{:.2f}"),
        number("times_xla", "{:.2f}"),
        "; ".join(more),
    ]


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.1f}" if x >= 10 else f"{x:.2g}"


def rich_tables(report: Report) -> Iterable[Table]:
    """Makes one table per benchmark, without the columns it leaves empty."""
    for name, names, lines in _by_benchmark(report):
        table = Table(title=name)
        for column in names:
            is_number = COLUMNS.index(column) in range(_FIRST_NUMBER, len(COLUMNS) - 1)
            table.add_column(column, justify="right" if is_number else "left")
        for line in lines:
            table.add_row(*line)
        yield table


def markdown(report: Report) -> str:
    """Renders a report as a section of a README."""
    parts = [f"{title(report)}.", ceilings(report)]
    for name, names, lines in _by_benchmark(report):
        parts.append(f"### `{name}`")
        rows = [names, ["---"] * len(names), *lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    parts += [f"Skipped: {reason}" for reason in report.skipped]
    parts += [f"Failed: {reason}" for reason in report.failed]
    return "\n\n".join(parts) + "\n"


def _by_benchmark(
    report: Report,
) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    for name, rows in groupby(derived(report), key=lambda row: row["benchmark"]):
        lines = [cells(row) for row in rows]
        used = [any(column) for column in zip(*lines, strict=True)]
        kept = [[c for c, u in zip(line, used, strict=True) if u] for line in lines]
        names = [c for c, u in zip(COLUMNS, used, strict=True) if u]
        yield name, names, kept


def regression_table(changes: Iterable[Change], threshold: float) -> Table:
    """Makes the table of what became slower."""
    table = Table("benchmark", "op", "case", "implementation", "before", "now", "ratio")
    table.title = f"More than {threshold} times the old time"
    for change in changes:
        old, new = _short(change.old_us), _short(change.new_us)
        table.add_row(*change[:4], old, new, f"{change.ratio:.2f}")
    return table
