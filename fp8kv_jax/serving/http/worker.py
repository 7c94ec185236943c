"""The thread that an engine lives in, and how an event loop talks to it."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from fp8kv_jax.serving.engine import Engine
from fp8kv_jax.serving.http.metrics import Metrics, Timer, observe
from fp8kv_jax.serving.request import Output, Request, Stats

type State = Literal["starting", "accepting", "stopping", "failed"]

# An output with its prompt's index; None once all prompts are taken.
type Event = tuple[int, Output] | Exception | None

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The engine does not take a request: it can never run."""


class Stopped(Exception):
    """The engine has ended before the request did."""


class Job:
    """Prompts under way together; iterate over their outputs in the loop they are of.

    Args:
      requests: one for each prompt.
      timers: for each of them, one for each continuation.
    """

    def __init__(
        self, requests: Sequence[Request], timers: Sequence[Sequence[Timer]]
    ) -> None:
        self.requests = requests
        self.timers = timers
        self.num_left = sum(request.params.n for request in requests)
        self.request_ids: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def accepted(self) -> None:
        """Waits until the engine has taken all prompts.

        Raises:
          Refused, Stopped: if it has not.
        """
        error = await self._events.get()
        if isinstance(error, Exception):
            raise error

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """What the continuations get, each with its prompt's index, until all end.

        Raises:
          Stopped: if the engine ends before.
        """
        num_left = sum(request.params.n for request in self.requests)
        while num_left:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            assert event is not None
            num_left -= event[1].finish_reason is not None
            yield event

    def put(self, event: Event) -> None:
        """Hands something over from the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # that loop has ended, and whoever waited with it
            _log.debug("nobody waits for %s any more", self.request_ids)


class Worker:
    """Runs an engine in a thread of its own.

    Args:
      engine: nobody else may touch it from `start` to the end of `stop`.
      metrics: gets times and observations.
      prepare: runs in the thread before the first request: compiles, calibrates.
      on_frozen: runs in the thread once the scales freeze there, between two steps.
      on_stop: runs in the thread at the end, unless the engine has failed.
      on_failure: called in the thread when it has.

    Attributes:
      state: "starting" until `prepare` is done.
      error: what the engine failed with.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        prepare: Callable[[Engine], object] = Engine.warm_up,
        on_frozen: Callable[[Engine], object] | None = None,
        on_stop: Callable[[Engine], object] | None = None,
        on_failure: Callable[[], object] | None = None,
    ) -> None:
        self.metrics = metrics
        self.state: State = "starting"
        self.error: BaseException | None = None
        self.on_failure = on_failure
        self._engine = engine
        self._prepare, self._on_frozen, self._on_stop = prepare, on_frozen, on_stop
        self._was_frozen = engine.stats().frozen
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # By the engine's id: whose request it is, and which of its prompts.
        self._jobs: dict[int, tuple[Job, int]] = {}
        self._open: set[Job] = set()
        # A compilation cannot be interrupted, and should not hold up an exit.
        self._thread = threading.Thread(
            target=self._main, name="fp8kv-engine", daemon=True
        )
        metrics.observation = observe(engine)

    @property
    def stats(self) -> Stats:
        """The engine's counts; at most as old as a step."""
        return self._engine.stats()

    @property
    def compiled(self) -> tuple[int, int]:
        """How many of the steps that the start waits for are there, and of how many."""
        return self._engine.compiled

    @property
    def max_seq_len(self) -> int:
        return self._engine.config.max_seq_len

    @property
    def num_open(self) -> int:
        """Continuations submitted that have not ended."""
        return sum(job.num_left for job in list(self._open))

    def start(self) -> None:
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends what is left of the requests, and the thread.

        It is not waited for while it prepares: see `has_ended`.
        """
        was_starting = self.state == "starting"
        if self.state != "failed":
            self.state = "stopping"
        self._inbox.put(lambda: None)
        if not was_starting:
            self._thread.join()

    def submit(self, requests: Sequence[Request]) -> Job:
        """Hands requests to the engine, all or none; called in an event loop."""
        time = self.metrics.time
        timers = [[time() for _ in range(r.params.n)] for r in requests]
        job = Job(requests, timers)
        self._open.add(job)
        self._inbox.put(lambda: self._add(job))
        # A thread that has ended meanwhile would never answer.
        if not self._thread.is_alive():
            self._end(job, Stopped("The engine has ended."))
        return job

    def abort(self, job: Job) -> None:
        """Ends what has not ended of a job; its pages are free at once."""
        self._inbox.put(lambda: self._abort(job))

    async def refresh(self, max_seconds: float = 2.0) -> None:
        """Observes the engine anew for the metrics, if it gets to it in time."""
        if self.state != "accepting":
            return
        done: Future[None] = Future()

        def look() -> None:
            self.metrics.observation = observe(self._engine)
            if done.set_running_or_notify_cancel():
                done.set_result(None)

        self._inbox.put(look)
        waiting = asyncio.wrap_future(done)
        await asyncio.wait([waiting], timeout=max_seconds)
        waiting.cancel()

    def _main(self) -> None:
        try:
            self._prepare(self._engine)
            self._note_freeze()
            if self.state == "starting":
                self.state = "accepting"
                _log.info("accepting requests")
            self._serve()
            if self._on_stop is not None:
                self._on_stop(self._engine)
        except BaseException as error:
            _log.error("the engine has failed: %r", error)
            self.error = error
            self.state = "failed"
            if self.on_failure is not None:
                self.on_failure()
        finally:
            for job in list(self._open):
                self._end(job, Stopped("The engine has ended."))
            self._engine.close()

    def _serve(self) -> None:
        engine = self._engine
        while True:
            self._read_inbox(wait=not engine.has_work)
            if self.state == "stopping":
                for request_id in list(self._jobs):
                    engine.abort(request_id)
            for output in engine.step():
                self._deliver(output)
            self._note_freeze()
            if self.state == "stopping" and not engine.has_work:
                return

    def _read_inbox(self, *, wait: bool) -> None:
        wait = wait and self.state != "stopping"
        while True:
            try:
                task = self._inbox.get(block=wait)
            except queue.Empty:
                return
            task()
            wait = False

    def _add(self, job: Job) -> None:
        if job not in self._open:
            return
        for index, request in enumerate(job.requests):
            try:
                request_id = self._engine.add(request)
            except ValueError as error:
                self._end(job, Refused(str(error)))
                self._abort(job)
                return
            job.request_ids.append(request_id)
            self._jobs[request_id] = job, index
        job.put(None)

    def _abort(self, job: Job) -> None:
        self._open.discard(job)
        for request_id in job.request_ids:
            self._engine.abort(request_id)

    def _deliver(self, output: Output) -> None:
        job, prompt = self._jobs[output.request_id]
        timer = job.timers[prompt][output.index]
        if output.token_ids:
            timer.token()
        if output.finish_reason is not None:
            job.num_left -= 1
            if output.finish_reason != "abort":
                timer.end(output.num_output_tokens)
        job.put((prompt, output))
        if not job.num_left:
            self._open.discard(job)
            for request_id in job.request_ids:
                del self._jobs[request_id]

    def _end(self, job: Job, error: Exception) -> None:
        self._open.discard(job)
        job.put(error)

    def _note_freeze(self) -> None:
        if self._was_frozen or not self._engine.stats().frozen:
            return
        self._was_frozen = True
        if self._on_frozen is not None:
            self._on_frozen(self._engine)
