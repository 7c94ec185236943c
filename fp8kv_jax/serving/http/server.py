"""Runs the application on a socket until it is told to stop."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from fp8kv_jax.serving.http.config import ServerConfig
from fp8kv_jax.serving.http.worker import Worker


def bind(host: str, port: int) -> socket.socket:
    """Takes a port without listening yet; 0 for any.

    Raises:
      OSError: if it is in use, or the host is none of this machine's.
    """
    kind = socket.SOCK_STREAM
    family, _, _, _, address = socket.getaddrinfo(host, port, type=kind)[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Others that bound it too find out here, not when a client comes.
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


def make_server(
    app: Starlette,
    worker: Worker,
    config: ServerConfig,
    *,
    shutdown_timeout: float = 30.0,
) -> "Server":
    """Puts an application behind HTTP.

    Args:
      app: as of `make_app`, over `worker`.
      worker: if its engine fails, the server stops.
      config: gives the time for headers.
      shutdown_timeout: seconds that requests under way get when it stops; what is left
        of them then is aborted.
    """
    protocol = type("Protocol", (_Protocol,), {"header_timeout": config.header_timeout})
    server = Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
        )
    )
    worker.on_failure = server.stop
    return server


class Server(uvicorn.Server):
    """A uvicorn server for which a signal to stop is a normal end."""

    def stop(self) -> None:
        """Stops soon; may be called in any thread."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own raises the signal again once all is done.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stops = signal.SIGINT, signal.SIGTERM
        before = {number: signal.signal(number, self.handle_exit) for number in stops}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """HTTP/1.1 that ends connections whose headers do not come; uvicorn waits on."""

    header_timeout: float
    _timer: asyncio.TimerHandle | None = None
    # The request before the one whose headers are waited for.
    _waits_after: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not self._waits_after:
            self._stop_waiting()
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()

    def _wait_for_headers(self) -> None:
        if self._timer is None:
            self._waits_after = self.cycle
            self._timer = self.loop.call_later(self.header_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is self._waits_after:
            self.transport.close()
