"""Clients and engines that misbehave: defined answers, and no page is lost."""

import json
import socket
import time

import httpx
import openai
import pytest
from http_server import RunningServer, wait_for

ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    limits = {"max_body_bytes": 4096, "header_timeout": 0.4, "body_timeout": 0.4}
    with RunningServer(**limits) as running:
        yield running
        running.wait_until_idle()
        assert running.post(ASK).status_code == 200


class Wire:
    """A connection that says what it is told to."""

    def __init__(self, server):
        self._socket = socket.create_connection(("127.0.0.1", server.port), 60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def send(self, data):
        self._socket.sendall(data)

    def ask(self, body, **headers):
        body = json.dumps(body).encode()
        headers = {"Host": "x", "Content-Length": len(body)} | headers
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.send(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)

    def read_some(self):
        return self._socket.recv(65536).decode()

    def read(self):
        """What comes until the server closes."""
        data = b""
        while part := self._socket.recv(65536):
            data += part
        return data.decode()


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 4000,
        b'{"model": ' + b"9" * 4000 + b"5}",
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(server, body):
    response = server.post(body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": 3}, 400, "model"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [[3], "a"]}, 400, "prompt"),
        ({"prompt": [64]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"max_tokens": 0}, 400, None),
        ({"max_tokens": "2"}, 400, "max_tokens"),
        ({"max_tokens": 10**30}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"temperature": -1}, 400, None),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"top_p": 0}, 400, None),
        ({"top_p": "1"}, 400, "top_p"),
        ({"n": 0}, 400, None),
        ({"n": 65}, 400, "n"),
        ({"logprobs": 21}, 400, None),
        ({"stop": [""]}, 400, None),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"stop": 3}, 400, "stop"),
        ({"stop_token_ids": ["a"]}, 400, "stop_token_ids"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"temprature": 1}, 400, "temprature"),
        ({"best_of": 2}, 422, "best_of"),
        ({"echo": True}, 422, "echo"),
        ({"suffix": "x"}, 422, "suffix"),
        ({"logit_bias": {"3": 1}}, 422, "logit_bias"),
        ({"presence_penalty": 0.5}, 422, "presence_penalty"),
    ],
)
def test_a_wrong_field_is_named(server, change, status, param):
    response = server.post(ASK | change)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": ["hello"]}, 400, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0]"),
        ({"messages": [{"role": [], "content": "x"}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": [3]}]}, 400, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "messages[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            422,
            "messages[0]",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, 422, "messages[0]"),
        ({"tools": [{"type": "function"}]}, 422, "tools"),
        ({"response_format": {"type": "json_object"}}, 422, "response_format"),
        ({"top_logprobs": 2}, 400, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(server, change, status, param):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    response = server.post(ask | change, "/v1/chat/completions")
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_neutral_values_of_what_is_not_served_are_fine(server):
    ask = ASK | {"echo": False, "best_of": 1, "logit_bias": {}, "user": "me"}
    ask |= {"presence_penalty": 0.0, "suffix": None, "max_tokens": 2.0}
    assert server.post(ask).status_code == 200


def test_unknown_paths_and_methods_get_the_error_object(server):
    assert error_of(server.get("/v1/unknown")) == (404, None)
    assert error_of(server.get("/v1/completions")) == (405, None)


def test_a_body_that_says_it_is_too_large_is_not_read(server):
    with Wire(server) as wire:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000"
        wire.send(f"{head}\r\n\r\n".encode())
        answer = wire.read()
    assert answer.startswith("HTTP/1.1 413 ")
    assert "body_too_large" in answer


def test_a_body_that_grows_too_large_is_a_413(server):
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    with Wire(server) as wire:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked"
        wire.send(f"{head}\r\n\r\n".encode() + chunk * 5)
        assert wire.read().startswith("HTTP/1.1 413 ")


def test_a_body_that_comes_too_slowly_is_a_408(server):
    with Wire(server) as wire:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100"
        wire.send(f"{head}\r\n\r\n{{".encode())
        answer = wire.read()
    assert answer.startswith("HTTP/1.1 408 ")
    assert "body_timeout" in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost:"])
def test_headers_that_do_not_come_end_the_connection(server, sent):
    with Wire(server) as wire:
        wire.send(sent)
        started = time.monotonic()
        assert wire.read() == ""
        assert 0.2 < time.monotonic() - started < 30


def test_headers_that_stop_after_a_first_request_end_the_connection(server):
    with Wire(server) as wire:
        wire.ask(ASK)
        assert wire.read_some().startswith("HTTP/1.1 200 ")
        wire.send(b"POST /v1/comp")
        started = time.monotonic()
        wire.read()
        # Before the idle time after a response is over.
        assert time.monotonic() - started < 4


def test_what_is_no_http_is_a_400(server):
    with Wire(server) as wire:
        wire.send(b"\x16\x03\x01 hello\r\n\r\n")
        assert wire.read().startswith("HTTP/1.1 400 ")


def test_headers_without_end_are_a_400(server):
    with Wire(server) as wire:
        wire.send(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
        assert wire.read().startswith("HTTP/1.1 400 ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_holds_no_page(stream):
    with RunningServer(step_seconds=0.02) as server:
        with Wire(server) as wire:
            wire.ask(ASK | {"max_tokens": 50, "stream": stream})
            wait_for(lambda: server.worker.stats.num_output_tokens > 1)
        server.wait_until_idle()
        stats = server.worker.stats
        assert stats.num_aborted == 1
        assert stats.num_output_tokens < 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(stream):
    with RunningServer(step_seconds=0.05, request_timeout=0.5) as server:
        ask = ASK | {"max_tokens": 50, "stream": stream}
        # Compiled before: only steps count.
        server.engine.step()
        response = server.post(ask)
        text = response.text
        server.wait_until_idle()
        assert server.worker.stats.num_aborted == 1
    assert response.status_code == (200 if stream else 503)
    assert '"code":"timeout"' in text
    assert "[DONE]" not in text


def test_a_stream_under_way_ends_before_the_server_does():
    with RunningServer(step_seconds=0.02) as server:
        ask = ASK | {"max_tokens": 20, "stream": True, "model": "tiny"}
        with server.openai() as client:
            stream = client.completions.create(**ask)
            next(stream)
            server.server.stop()
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        server.stop()
        assert server.worker.has_ended
        with pytest.raises(httpx.ConnectError):
            server.get("/health")


def test_what_outlasts_the_shutdown_is_aborted():
    stopped = []
    options = {"on_stop": lambda engine: stopped.append(engine.stats())}
    with RunningServer(
        step_seconds=0.1, shutdown_timeout=1, worker_options=options
    ) as server:
        client = server.openai()
        stream = client.completions.create(**ASK | {"max_tokens": 59, "stream": True})
        next(stream)
        server.server.stop()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        server.stop()
    assert stopped[0].num_used_pages == 0
    assert stopped[0].num_aborted == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_ends_its_requests_and_the_server(stream, caplog):
    with RunningServer(step_seconds=0.02) as server:
        step = server.engine.step

        def failing_step():
            if server.engine.stats().num_output_tokens > 3:
                raise RuntimeError("the device is gone")
            return step()

        server.engine.step = failing_step
        response = server.post(ASK | {"max_tokens": 50, "stream": stream})
        assert response.status_code == (200 if stream else 503)
        assert "The server has failed" in response.text
        server.stop()
        assert isinstance(server.worker.error, RuntimeError)
    assert "the device is gone" in caplog.text
