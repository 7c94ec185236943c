"""Runs benchmarks in processes of their own: they lower at once, and measure in turn.

What a benchmark lowers it lowers on one thread, in Python, while the GPU idles. Here
one has the turn on the device and the others lower meanwhile; a process that waits
holds no arrays, and one that ends gives all of its memory back. Compile times are
measured in a turn too, on cores that no other process needs once all have lowered.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Literal

from benchmarks import turn
from benchmarks.report import Report
from benchmarks.suite import (
    OUT_OF_TIME,
    Event,
    Progress,
    describe,
    events_of,
    measure,
)

# Not forked: JAX has threads.
_CONTEXT = multiprocessing.get_context("spawn")
# What a process sends beside events.
_READY, _ENDED = "ready", "ended"


def begin(small: bool) -> Report:
    """Begins a report; what the ceilings take of the device is given back."""
    with ProcessPoolExecutor(max_workers=1, mp_context=_CONTEXT) as pool:
        return pool.submit(measure, small).result()


def run(
    names: Sequence[str], *, small: bool, deadline: float, progress: Progress
) -> Iterator[tuple[str, Event | None]]:
    """Runs benchmarks side by side, as many at once as lower on a core of their own.

    Args:
      names: which; they measure in the order in which they have lowered.
      small: shapes for a machine without a GPU.
      deadline: of `time.monotonic`; no further case is started after it.
      progress: told who measures, who waits and who lowers.
    """
    pending, children = list(names), dict[Connection, _Child]()
    try:
        while pending or children:
            lowering = [c for c in children.values() if c.doing == "lowers"]
            free = len(os.sched_getaffinity(0)) - len(lowering)
            for name in pending[: max(0, free)]:
                child = _Child.start(name, small, deadline)
                children[child.connection] = child
                pending.remove(name)
            yield from _give_turn(children, deadline)
            progress(_who_does_what(children, pending))
            for connection in wait(list(children), timeout=1):
                assert isinstance(connection, Connection)
                yield from _hear(children, connection)
    finally:
        for child in children.values():
            child.process.kill()


@dataclass
class _Child:
    """A benchmark's process, as its parent sees it."""

    name: str
    process: BaseProcess
    connection: Connection
    doing: Literal["lowers", "waits", "measures", "ended"] = "lowers"
    last: str = ""

    @classmethod
    def start(cls, name: str, small: bool, deadline: float) -> "_Child":
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(
            target=_run_child, args=(name, small, deadline, theirs), daemon=True
        )
        process.start()
        theirs.close()  # so that its end is the end of what is received
        return cls(name, process, ours)


def _run_child(name: str, small: bool, deadline: float, parent: Connection) -> None:
    # An interrupt reaches all processes of a terminal: the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait_for_turn() -> None:
        parent.send(_READY)
        parent.recv()

    turn.wait_with(wait_for_turn)
    for event in events_of(name, small=small, deadline=deadline):
        parent.send(event)
    parent.send(_ENDED)


def _give_turn(
    children: dict[Connection, _Child], deadline: float
) -> Iterator[tuple[str, Event | None]]:
    """Lets the next one measure, if none does; past the deadline ends who has not."""
    before = [c for c in children.values() if c.doing in ("lowers", "waits")]
    waiting = [c for c in before if c.doing == "waits"]
    if time.monotonic() > deadline:
        for child in before:
            yield child.name, {"skipped": OUT_OF_TIME}
            child.doing = "ended"
            child.process.kill()
    elif waiting and len(before) == len(children):
        waiting[0].doing = "measures"
        # Of one that died meanwhile, the end is heard next.
        with contextlib.suppress(BrokenPipeError):
            waiting[0].connection.send(None)


def _hear(
    children: dict[Connection, _Child], connection: Connection
) -> Iterator[tuple[str, Event | None]]:
    """Takes one message of a child, or that its process is no more."""
    child = children[connection]
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        # Only then is its memory of the device free for the next one.
        child.process.join()
        del children[connection]
        if child.doing != "ended":
            code = child.process.exitcode
            yield child.name, {"failed": f"its process ended with exit code {code}"}
        yield child.name, None
        return
    if message == _ENDED:
        child.doing = "ended"
        child.process.kill()  # all is said, and JAX's own end takes longer
    elif child.doing == "ended":
        return  # said before it was ended
    elif message == _READY:
        # To the end of those that wait.
        children[connection] = children.pop(connection)
        child.doing = "waits"
    else:
        child.last = describe(child.name, message) if "op" in message else child.last
        yield child.name, message


def _who_does_what(children: dict[Connection, _Child], pending: list[str]) -> str:
    """Says it in one line: `absmax: ... | waiting: pages | lowering: window`."""
    parts = [
        child.last or child.name
        for child in children.values()
        if child.doing in ("measures", "ended")
    ]
    for label, doing in (("waiting", "waits"), ("lowering", "lowers")):
        names = [child.name for child in children.values() if child.doing == doing]
        parts += [f"{label}: {', '.join(names)}"] if names else []
    parts += [f"not started: {', '.join(pending)}"] if pending else []
    return " | ".join(parts)
