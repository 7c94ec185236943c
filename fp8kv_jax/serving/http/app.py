"""The endpoints: OpenAI's, two for probes and one for Prometheus."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8kv_jax.serving.http.answers import Answer
from fp8kv_jax.serving.http.config import ServedModel, ServerConfig
from fp8kv_jax.serving.http.errors import ApiError
from fp8kv_jax.serving.http.fields import parse_object
from fp8kv_jax.serving.http.metrics import CONTENT_TYPE
from fp8kv_jax.serving.http.schemas import Asked, parse_chat, parse_completion
from fp8kv_jax.serving.http.worker import Job, Refused, State, Stopped, Worker
from fp8kv_jax.serving.request import Output

type Parse = Callable[..., Asked]

_PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/v1/models"),
    *("/health", "/ready", "/metrics"),
}
# For an error to somebody who may not be reading any more.
_FAREWELL_SECONDS = 1.0


def make_app(worker: Worker, model: ServedModel, config: ServerConfig) -> Starlette:
    """Builds the application; its lifespan starts and stops the worker."""
    info = _Info(worker, model, config)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    completions = _Completions(parse_completion, worker, model, config)
    chat = _Completions(parse_chat, worker, model, config)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.one_model),
        Route("/health", info.health),
        Route("/ready", info.ready),
        Route("/metrics", info.metrics),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        },
    )
    app.add_middleware(_Guard, worker=worker, api_key=config.api_key)
    return app


def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    message = f"{error.detail}: {request.method} {path}."
    answer = ApiError(error.status_code, message)
    answer.headers |= dict(error.headers or {})
    return answer.response()


def _answer_bug(request: Request, error: Exception) -> Response:
    return ApiError(500, "The server has failed; see its log.").response()


class _Guard:
    """Checks the API key of `/v1`, and counts responses."""

    def __init__(self, app: ASGIApp, worker: Worker, api_key: str | None) -> None:
        self._app = app
        self._count = worker.metrics.responses
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Clients choose paths: unknown ones would fill the memory.
        path = scope["path"] if scope["path"] in _PATHS else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count.labels(path, message["status"]).inc()
            await send(message)

        if scope["path"].startswith("/v1") and not self._allows(scope):
            message = "Expected a valid API key as bearer."
            error = ApiError(401, message, code="invalid_api_key", closes=True)
            await error.response()(scope, receive, counting)
            return
        await self._app(scope, receive, counting)

    def _allows(self, scope: Scope) -> bool:
        if self._expected is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)


class _Info:
    """What the server tells about itself."""

    def __init__(
        self, worker: Worker, model: ServedModel, config: ServerConfig
    ) -> None:
        self._worker = worker
        self._model = model
        self._ready_when = config.ready_when
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def one_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._model.name:
            raise ApiError(
                404, f"Expected the model {self._model.name!r}.", code="model_not_found"
            )
        return JSONResponse(self._describe_model())

    async def health(self, request: Request) -> Response:
        """Whether the engine's thread is alive, whatever it does."""
        state = self._worker.state
        return JSONResponse({"status": state}, 503 if state == "failed" else 200)

    async def ready(self, request: Request) -> Response:
        """Whether requests are answered, and where the calibration stands."""
        stats, state = self._worker.stats, self._worker.state
        accepts = state == "accepting"
        calibration = "frozen" if stats.frozen else "calibrating"
        body = {
            "status": calibration if accepts else state,
            "accepting": accepts,
            "calibration": calibration,
            "tokens_seen": stats.tokens_seen,
            "window_tokens": stats.window_tokens if stats.calibrates else 0,
            "epoch": stats.epoch,
        }
        if state == "starting":
            body["steps_compiled"], body["steps_to_compile"] = self._worker.compiled
        if accepts and (stats.frozen or self._ready_when == "accepting"):
            return JSONResponse(body)
        return JSONResponse(body, 503, headers={"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        await self._worker.refresh()
        text = self._worker.metrics.text()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fp8kv",
            "max_model_len": self._worker.max_seq_len,
        }


class _Completions:
    """An endpoint for text, from a request's body to the last byte of the answer."""

    def __init__(
        self, parse: Parse, worker: Worker, model: ServedModel, config: ServerConfig
    ) -> None:
        self._parse = parse
        self._worker = worker
        self._model = model
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        responding = _Responding(send)
        seconds = self._config.request_timeout
        try:
            async with asyncio.timeout(seconds):
                self._check_accepting()
                body = await read_body(Request(scope, receive), self._config)
                # Long prompts take a while; others should not wait for them.
                asked = await asyncio.to_thread(self._read, body)
                await _unless_gone(receive, self._respond(asked, responding))
        except ClientDisconnect:
            return
        except ApiError as error:
            await responding.fail(error)
        except TimeoutError:
            message = f"The request took more than {seconds:g} s."
            await responding.fail(ApiError(503, message, code="timeout", closes=True))
        except Stopped:
            await responding.fail(_unavailable(self._worker.state))

    def _check_accepting(self) -> None:
        if self._worker.state != "accepting":
            raise _unavailable(self._worker.state)

    def _read(self, body: bytes) -> Asked:
        # What could never be accepted is no matter of trying again.
        choices = min(self._config.max_choices, self._config.max_open)
        return self._parse(parse_object(body), self._model, max_choices=choices)

    async def _respond(self, asked: Asked, responding: "_Responding") -> None:
        async with self._submit(asked) as job:
            answer = Answer(asked, self._model)
            outputs = job.outputs()
            if not asked.stream:
                async for prompt, output in outputs:
                    answer.add(prompt, _not_aborted(output))
                await responding.whole(answer.whole())
                return
            await responding.begin()
            async for prompt, output in outputs:
                for event in answer.events(prompt, _not_aborted(output)):
                    await responding.event(event)
            last = answer.last_event()
            if last is not None:
                await responding.event(last)
            await responding.end()

    @contextlib.asynccontextmanager
    async def _submit(self, asked: Asked) -> AsyncGenerator[Job]:
        """Hands the prompts to the engine; whatever has not ended is aborted."""
        worker, limit = self._worker, self._config.max_open
        if worker.num_open + asked.num_choices > limit:
            raise ApiError(
                429,
                f"Expected at most {limit} continuations at a time, got more.",
                code="queue_full",
                retry_after=1,
            )
        job = worker.submit(asked.requests)
        try:
            await job.accepted()
            yield job
        except Refused as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from None
        finally:
            worker.abort(job)


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Reads a request's body.

    Raises:
      ApiError: 413 if it is too large, 408 if it takes too long.
    """
    limit, seconds = config.max_body_bytes, config.body_timeout
    message = f"Expected a body of at most {limit} bytes."
    too_large = ApiError(413, message, code="body_too_large", closes=True)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        message = f"Expected the body within {seconds:g} s."
        raise ApiError(408, message, code="body_timeout", closes=True) from None
    return bytes(body)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Works on an answer until it is done or the client leaves."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(leave())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unavailable(state: State) -> ApiError:
    doing = "has failed" if state == "failed" else f"is {state}"
    return ApiError(503, f"The server {doing}.", code=state, retry_after=5, closes=True)


def _not_aborted(output: Output) -> Output:
    """Only a stopping worker aborts what somebody still waits for."""
    if output.finish_reason == "abort":
        raise Stopped
    return output


class _Responding:
    """Sends a response, whole or in events; an error in whatever form is left."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def whole(self, body: dict[str, Any]) -> None:
        await self._respond(JSONResponse(body))

    async def begin(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        self._begun = True
        await self._send(start)

    async def event(self, body: dict[str, Any]) -> None:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        await self._write(f"data: {text}\n\n")

    async def end(self) -> None:
        await self._write("data: [DONE]\n\n", more=False)

    async def fail(self, error: ApiError) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                if not self._begun:
                    await self._respond(error.response())
                    return
                await self.event(error.body())
                await self._write("", more=False)

    async def _respond(self, response: Response) -> None:
        self._begun = True

        async def nothing() -> Message:
            raise AssertionError("a whole response reads nothing")

        await response({"type": "http", "extensions": {}}, nothing, self._send)

    async def _write(self, text: str, *, more: bool = True) -> None:
        body = text.encode()
        await self._send(
            {"type": "http.response.body", "body": body, "more_body": more}
        )
