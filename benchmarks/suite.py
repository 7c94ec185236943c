"""Runs benchmarks and collects their rows: in this process, or side by side."""

import gc
import importlib
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
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
OUT_OF_TIME = "--seconds were used up"

# A row, or one field `skipped` or `failed` that says why there is none.
type Event = dict[str, Any]
type Progress = Callable[[str], None]
# Gives the events of some benchmarks, each with its benchmark's name. A benchmark's
# last one is the name alone: it has ended.
type Runner = Callable[..., Iterator[tuple[str, Event | None]]]


def run(
    names: Sequence[str],
    *,
    small: bool,
    seconds: float | None = None,
    progress: Progress = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
    begin: Callable[[bool], Report] | None = None,
    runner: Runner | None = None,
) -> Report:
    """Runs some benchmarks; one that fails is reported and the others go on.

    Args:
      names: which, in this order.
      small: shapes for a machine without a GPU.
      seconds: no further case is started after this time; None for no limit.
      progress: told what is under way.
      keep: given the report so far after each row.
      begin: makes the report, with the ceilings; in this process by default.
      runner: runs the benchmarks; one after the other, in this process, by default.
    """
    started = began = time.monotonic()
    deadline = float("inf") if seconds is None else started + seconds
    progress("ceilings of this device")
    report = (begin or measure)(small)
    events = (runner or in_this_process)(
        names, small=small, deadline=deadline, progress=progress
    )
    for name, event in events:
        if event is None:
            now = time.monotonic()
            report.seconds[name], began = now - began, now
        elif "skipped" in event:
            report.skipped.append(f"{name}: {event['skipped']}")
        elif "failed" in event:
            report.failed.append(f"{name}: {event['failed']}")
        else:
            report.rows.append({"benchmark": name} | event)
        keep(report)
    return report


def measure(small: bool) -> Report:
    """Begins a report with the ceilings of this device."""
    return begin_report(measure_ceilings(), small=small)


def load(name: str) -> Callable[..., Iterable[Event]]:
    """Imports a benchmark: its `run(small)`, which gives rows."""
    return importlib.import_module(f"benchmarks.bench_{name}").run


def in_this_process(
    names: Sequence[str], *, small: bool, deadline: float, progress: Progress
) -> Iterator[tuple[str, Event | None]]:
    """Runs benchmarks one after the other."""
    for name in names:
        progress(name)
        for event in events_of(name, small=small, deadline=deadline):
            if "op" in event:
                progress(describe(name, event))
            yield name, event
        yield name, None
        gc.collect()  # so that the next one finds the device's memory free


def describe(name: str, row: Event) -> str:
    return f"{name}: {row['op']} {row['case']} {row['implementation']}"


def events_of(name: str, *, small: bool, deadline: float) -> Iterator[Event]:
    """Runs one benchmark until it ends, fails, or has no time left."""
    if time.monotonic() > deadline:
        yield {"skipped": OUT_OF_TIME}
        return
    try:
        for event in load(name)(small=small):
            yield event
            if time.monotonic() > deadline and "skipped" not in event:
                after = f"after {event['op']} {event['case']}"
                yield {"skipped": f"{OUT_OF_TIME} {after}"}
                return
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        yield {"failed": f"{type(error).__name__}: {lines[0]}"}
