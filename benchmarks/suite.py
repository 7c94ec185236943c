"""Runs benchmarks one after the other and collects their rows."""

import gc
import importlib
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.report import Report, begin_report
from benchmarks.timing import measure_ceilings

# Every module `bench_<name>` is a benchmark.
NAMES = tuple(
    sorted(
        path.stem.removeprefix("bench_")
        for path in pathlib.Path(__file__).parent.glob("bench_*.py")
    )
)

type Progress = Callable[[str], None]


def run(
    names: Sequence[str],
    *,
    small: bool,
    seconds: float | None = None,
    progress: Progress = lambda text: None,
    finished: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Runs some benchmarks; one that fails is reported and the others go on.

    Args:
      names: which, in this order.
      small: shapes for a machine without a GPU.
      seconds: no further case is started after this time; None for no limit.
      progress: told what is under way.
      finished: given the report so far after each benchmark, to keep it.
    """
    started = time.monotonic()
    progress("ceilings of this device")
    report = begin_report(measure_ceilings(), small=small)

    def out_of_time() -> bool:
        return seconds is not None and time.monotonic() - started > seconds

    for name in names:
        began = time.monotonic()
        try:
            _run_one(name, report, out_of_time, progress)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).splitlines() or [""]
            report.failed.append(f"{name}: {type(error).__name__}: {lines[0]}")
        report.seconds[name] = time.monotonic() - began
        finished(report)
        gc.collect()  # so that the next one finds the device's memory free
    return report


def load(name: str) -> Callable[..., Iterable[dict[str, Any]]]:
    """Imports a benchmark: its `run(small)`, which gives rows."""
    return importlib.import_module(f"benchmarks.bench_{name}").run


def _run_one(
    name: str, report: Report, out_of_time: Callable[[], bool], progress: Progress
) -> None:
    progress(name)
    reason = f"{name}: --seconds were used up"
    if out_of_time():
        report.skipped.append(reason)
        return
    for row in load(name)(small=report.small):
        if "skipped" in row:
            report.skipped.append(f"{name}: {row['skipped']}")
            continue
        report.rows.append({"benchmark": name} | row)
        progress(f"{name}: {row['op']} {row['case']} {row['implementation']}")
        if out_of_time():
            report.skipped.append(f"{reason} after {row['op']} {row['case']}")
            return
