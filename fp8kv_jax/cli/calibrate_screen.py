"""How far `fp8kv calibrate` is, shown on stderr."""

import time

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fp8kv_jax.scales.offline import Observed
from fp8kv_jax.scales.sample_plan import SamplePlan


class _TokensPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} tokens/s")


# Where stderr is a file: a line this often, in seconds.
_LINE_EVERY = 30.0


class CalibrationScreen:
    """A progress bar on stderr if that is a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._silent = False
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[samples]}"),
            _TokensPerSecond(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            speed_estimate_period=60,
        )
        self._task = self._bar.add_task("starting", total=None, samples="")
        self._num_samples = 0
        self._num_tokens = 0
        self._first: tuple[float, int] | None = None
        self._said = time.monotonic()

    def __enter__(self) -> "CalibrationScreen":
        self._silent = jax.process_index() > 0
        if not self._silent:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def note(self, line: str) -> None:
        if not self._silent:
            self._console.print(line, soft_wrap=True, markup=False)

    def watch(self, plan: SamplePlan) -> None:
        self._num_samples, self._num_tokens = len(plan.samples), plan.num_tokens
        self._bar.update(self._task, total=self._num_tokens)

    def advance(self, event: Observed) -> None:
        samples = f"{event.num_samples}/{self._num_samples} samples"
        self._bar.update(
            self._task,
            description="calibrating",
            completed=event.num_tokens,
            samples=samples,
        )
        now = time.monotonic()
        # The first event has compiled: what comes after it tells the speed.
        if self._first is None:
            self._first = (now, event.num_tokens)
        if self._bar.disable and now - self._said >= _LINE_EVERY:
            self._said = now
            self.note(f"calibrating: {samples}{self._speed(now, event.num_tokens)}")

    def _speed(self, now: float, num_tokens: int) -> str:
        assert self._first is not None
        since, tokens = self._first
        if num_tokens == tokens or now == since:
            return ""
        speed = (num_tokens - tokens) / (now - since)
        left = (self._num_tokens - num_tokens) / speed
        return f", {speed:,.0f} tokens/s, {left:,.0f} s left"
