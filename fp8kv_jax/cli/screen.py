"""Where output goes: text to stdout, notes and a live status line to stderr."""

import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text


class Screen:
    """Stdout and stderr, and the status line if stderr is a terminal.

    When both are the same terminal, the line of text under way is drawn together
    with the status line below it, and printed for good once it is complete. When both
    are the same file, a note begins on a line of its own.

    Args:
      status: makes the status line; called several times a second.
    """

    def __init__(self, status: Callable[[], str]) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._status = status
        self._unfinished = ""
        self._in_a_line = False
        self._live: Live | None = None
        if sys.stderr.isatty() and not self.console.is_dumb_terminal:
            self._live = Live(
                console=self.console,
                get_renderable=self._draw,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._shared = self._live is not None and _same_terminal()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        text, self._unfinished, self._shared = self._unfinished, "", False
        if text:
            self.write(text)

    def write(self, text: str) -> None:
        """Writes text to stdout, at once."""
        if not self._shared:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_a_line = bool(text) and not text.endswith("\n")
            return
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            self.console.print(Text(line), soft_wrap=True)

    def note(self, line: RenderableType) -> None:
        """Prints a line, or a table, to stderr."""
        if self._in_a_line and _same_file():
            self.console.print()
            self._in_a_line = False
        self.console.print(line, soft_wrap=isinstance(line, str), markup=False)

    def _draw(self) -> RenderableType:
        status = Text(self._status(), style="dim", no_wrap=True, overflow="ellipsis")
        if not self._unfinished:
            return status
        # A paragraph may be taller than the terminal: its end is what is new.
        size = self.console.size
        shown = self._unfinished[-size.width * max(1, size.height - 4) :]
        return Group(Text(shown), status)


def _same_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    return False


def _same_file() -> bool:
    """Whether both streams end in one pipe or file, as after `2>&1`."""
    with contextlib.suppress(OSError, ValueError):
        streams = sys.stdout.fileno(), sys.stderr.fileno()
        return os.path.samestat(*map(os.fstat, streams))
    return False
