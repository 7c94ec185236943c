"""A server over the tiny model, in threads of this process."""

import contextlib
import threading
import time

import httpx
import openai
import tiny_model
from serving_loop import make_engine

from fp8kv_jax.serving.http.app import make_app
from fp8kv_jax.serving.http.config import ServedModel, ServerConfig
from fp8kv_jax.serving.http.metrics import Metrics
from fp8kv_jax.serving.http.server import bind, make_server
from fp8kv_jax.serving.http.worker import Worker

# Token 3 + i is character i; 0 to 2 are the tiny model's planted ones.
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .:\n12345"
assert len(ALPHABET) == tiny_model.VOCAB - 3


def encode(text):
    return [3 + max(0, ALPHABET.find(character)) for character in text]


def token_bytes(token_id):
    return (ALPHABET[token_id - 3] if token_id >= 3 else "?").encode()


class Decoder:
    def push(self, index):
        return token_bytes(index).decode()

    def flush(self):
        return ""


def render_chat(messages):
    if messages[-1]["role"] != "user":
        raise ValueError("The last message must be the user's.")
    return "".join(f"{m['role']}:{m['content']}\n" for m in messages)


MODEL = ServedModel(
    name="tiny",
    vocab_size=tiny_model.VOCAB,
    encode=encode,
    token_bytes=token_bytes,
    render_chat=render_chat,
)


class RunningServer:
    """A server, its worker and clients of it; use it as a context.

    Args:
      step_seconds: makes each step take longer.
      prepare: what the worker does before; by default nothing, steps compile when
        they are needed.
    """

    def __init__(
        self,
        *,
        engine=None,
        model=MODEL,
        step_seconds=0.0,
        prepare=lambda engine: None,
        shutdown_timeout=5.0,
        waits=True,
        worker_options=None,
        **limits,
    ):
        self.engine = engine or make_engine(detokenizer=Decoder)
        if step_seconds:
            self._slow_down(step_seconds)
        config = ServerConfig(**limits)
        options = worker_options or {}
        self.worker = Worker(self.engine, Metrics(), prepare=prepare, **options)
        app = make_app(self.worker, model, config)
        self.server = make_server(
            app, self.worker, config, shutdown_timeout=shutdown_timeout
        )
        self._socket = bind("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._waits = waits
        self._thread = threading.Thread(target=self._run)
        self._clients = contextlib.ExitStack()

    def _run(self):
        self.server.run(sockets=[self._socket])

    def _slow_down(self, seconds):
        step = self.engine.step

        def slow_step():
            time.sleep(seconds)
            return step()

        self.engine.step = slow_step

    def __enter__(self):
        self._thread.start()
        if self._waits:
            wait_for(lambda: self.worker.state == "accepting" and self.server.started)
        return self

    def __exit__(self, *_):
        self._clients.close()
        self.stop()

    def stop(self):
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def openai(self, api_key="none"):
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=300
        )
        return self._clients.enter_context(client)

    def get(self, path):
        return httpx.get(self.url + path, timeout=300)

    def post(self, body, path="/v1/completions", **headers):
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, headers=headers, timeout=300, **kind)

    def wait_until_idle(self):
        """No page is held and no request is open."""
        wait_for(lambda: not self.worker.stats.num_used_pages)
        wait_for(lambda: not self.worker.num_open)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.005)
