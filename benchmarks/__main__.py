"""`python -m benchmarks`: checks each op, then times it, and prints tables."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Generator
from typing import Annotated

# Pools of 100 GB are measured: more of the device than JAX takes by default.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
# Processes share the device: one that waits for its turn must hold none of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Inputs that take the host seconds are made on it, also where only a GPU is named.
if (platforms := os.environ.get("JAX_PLATFORMS")) and "cpu" not in platforms:
    os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"

import jax
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import plots, side_by_side, suite, tables
from benchmarks.compare import compare
from benchmarks.report import Report, ReportError, read_report, write_report

FAILED, USAGE = 1, 2
ERR = Console(stderr=True, highlight=False)
# Wide where nobody looks: a table that is piped into a file is not to be folded.
OUT = Console(width=None if sys.stdout.isatty() else 200)

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.command()
def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Which of {', '.join(suite.NAMES)}; all by default."),
    ] = None,
    json: Annotated[
        pathlib.Path | None, typer.Option(help="Write the results here.")
    ] = None,
    old: Annotated[
        pathlib.Path | None,
        typer.Option("--compare", help="Fail if slower than this file's results."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=1.0, help="How many times the old time is too slow.")
    ] = 1.1,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Write plots into this folder.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown instead of tables.")
    ] = False,
    load: Annotated[
        pathlib.Path | None,
        typer.Option(help="Run nothing: take the results that --json wrote."),
    ] = None,
    small: Annotated[
        bool | None,
        typer.Option("--small/--full", help="Shapes; full ones on a GPU by default."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Start no further case after these.")
    ] = None,
) -> None:
    """Checks each op against its reference, times it, and compares the results."""
    with _one_line_errors():
        _check_places(json, plot)
        names = _known(names)
        before = read_report(old) if old else None
        report = read_report(load) if load else None
    if report is None:
        on_gpu = jax.default_backend() == "gpu"
        # On a CPU those that lower would disturb the one that measures.
        apart = on_gpu and len(names) > 1
        with _progress() as progress:
            report = suite.run(
                names,
                small=not on_gpu if small is None else small,
                seconds=seconds,
                progress=progress,
                keep=lambda so_far: _keep(so_far, json),
                begin=side_by_side.begin if apart else suite.measure,
                runner=side_by_side.run if apart else suite.in_this_process,
            )
    _keep(report, json)
    _show(report, markdown)
    for path in plots.write_plots(report, plot) if plot else ():
        ERR.print(f"wrote {path}")
    slower = before is not None and _show_comparison(before, report, threshold)
    if slower or report.failed:
        raise typer.Exit(FAILED)


def _keep(report: Report, path: pathlib.Path | None) -> None:
    """Writes what there is: a driver that ends the process leaves the rest."""
    if path:
        write_report(report, path)


def _check_places(json: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    """Finds out before the run what would spoil its end."""
    if plot and not plots.matplotlib_is_there():
        raise ReportError("Expected matplotlib for --plot: install the plot extra.")
    if json and not json.absolute().parent.is_dir():
        raise ReportError(f"Expected a folder to write {json} into.")


def _known(names: list[str] | None) -> list[str]:
    names = names or list(suite.NAMES)
    if unknown := sorted(set(names) - set(suite.NAMES)):
        raise ReportError(
            f"Expected names among {', '.join(suite.NAMES)}, got {', '.join(unknown)}."
        )
    return names


@contextlib.contextmanager
def _one_line_errors() -> Generator[None]:
    try:
        yield
    except ReportError as error:
        print(f"benchmarks: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(USAGE) from error


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)


def _show(report: Report, as_markdown: bool) -> None:
    if as_markdown:
        print(tables.markdown(report), end="")
        return
    OUT.print(tables.title(report))
    OUT.print(tables.ceilings(report))
    for table in tables.rich_tables(report):
        OUT.print(table)
    for reason in report.skipped:
        ERR.print(f"skipped {reason}", markup=False)
    for reason in report.failed:
        ERR.print(f"failed {reason}", markup=False)
    ERR.print(f"{sum(report.seconds.values()):.0f} s")


def _show_comparison(before: Report, report: Report, threshold: float) -> bool:
    """Prints what became slower, and says whether anything did."""
    with _one_line_errors():
        comparison = compare(before, report)
    slower = comparison.regressions(threshold)
    if slower:
        ERR.print(tables.regression_table(slower, threshold))
    for key in comparison.missing:
        ERR.print(f"not measured any more: {' '.join(key)}", markup=False)
    compared = len(comparison.changes)
    ERR.print(f"{len(slower)} of {compared} results are slower than before")
    return bool(slower)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
