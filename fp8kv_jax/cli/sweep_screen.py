"""How far `fp8kv sweep` is, shown on stderr."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class SweepScreen:
    """A progress bar on stderr, if that is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} tokens"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str, num_tokens: int | None = None) -> None:
        """Starts another bar; one without a length just moves."""
        self._bar.reset(self._task, description=name, total=num_tokens)

    def advance(self, num_tokens: int) -> None:
        self._bar.advance(self._task, num_tokens)
