"""How far `fp8kv replay` is, shown on stderr."""

import time
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

# Where stderr is a file: a line this often, in seconds.
_LINE_EVERY = 30.0


class ReplayScreen:
    """A bar for each phase if stderr is a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            speed_estimate_period=60,
        )
        self._task = self._bar.add_task("starting", total=None, unit="")
        self._said = time.monotonic()

    def __enter__(self) -> "ReplayScreen":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        """Names work of unknown length."""
        self._bar.reset(self._task, description=name, total=None, unit="")

    def watch(self, name: str, steps: Iterable[int], *, total: int, unit: str) -> None:
        """Runs work to its end; it yields how much of it is done."""
        self._bar.reset(self._task, description=name, total=total, unit=unit)
        for done in steps:
            self._bar.update(self._task, completed=done)
            now = time.monotonic()
            if self._bar.disable and now - self._said >= _LINE_EVERY:
                self._said = now
                self.note(f"{name}: {done:,} of {total:,} {unit}")

    def note(self, line: RenderableType) -> None:
        self._console.print(line, soft_wrap=isinstance(line, str), markup=False)
