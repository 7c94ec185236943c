"""`fp8kv serve`: its start, a kill and a restart, and the demo model behind it."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import httpx
import jax
import openai
import pytest
from http_server import RunningServer, wait_for

import models.loading
from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.cli import options, serve
from fp8kv_jax.cli.main import run
from fp8kv_jax.cli.model import load
from fp8kv_jax.cli.serve_state import read_calibration_prompts

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "models" / "data" / "tiny_llama"
# One shape of a step: quick to compile.
SIZES = "--max-num-seqs 4 --max-model-len 64 --max-num-batched-tokens 68 --page-size 8"


def command_line(snapshots, compiled):
    code = "from fp8kv_jax.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--model", TINY]
    command += [*SIZES.split(), "--fp8-kv-calibration-tokens", "30"]
    return [*command, "--snapshot", snapshots, "--compilation-cache", compiled]


def tiny(snapshots, compiled):
    """What the command runs, over a model that compiles faster."""
    return [
        sys.executable,
        Path(__file__).with_name("serve_tiny.py"),
        snapshots,
        compiled,
    ]


class Serving:
    """A server in a process of its own; use it as a context."""

    def __init__(self, command):
        # Unoptimized code compiles in a third of the time.
        flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        paths = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            env=os.environ | paths | flags,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.said += line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end(signal.SIGKILL)

    def end(self, number):
        """Sends a signal; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join()
        self.process.stderr.close()
        return code

    def wait_until_accepting(self):
        def accepts():
            assert self.process.poll() is None, self.said
            return "accepting requests" in self.said

        wait_for(accepts, 120)

    @property
    def url(self):
        return re.search(r"listening on (\S+)", self.said)[1]

    @contextlib.contextmanager
    def client(self):
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0
        ) as client:
            yield client

    def ready(self):
        return httpx.get(f"{self.url}/ready").json()

    def scales(self):
        text = httpx.get(f"{self.url}/metrics").text
        return re.findall(r"^fp8kv_scale\{.*$", text, re.MULTILINE)


def complete(client, **options):
    ask = {"prompt": "the quick brown fox jumps", "temperature": 0} | options
    name = next(iter(client.models.list())).id
    return client.completions.create(model=name, **ask)


@pytest.mark.parametrize(
    "command", [tiny, pytest.param(command_line, marks=pytest.mark.slow)]
)
def test_what_was_frozen_survives_a_kill_and_pages_a_stop(tmp_path, command):
    command = command(tmp_path / "snapshots", tmp_path / "compiled")
    another = {"prompt": "jackdaws love my big sphinx", "max_tokens": 8}
    with Serving(command) as serving:
        serving.wait_until_accepting()
        assert serving.ready()["status"] == "calibrating"
        with serving.client() as client:
            complete(client, max_tokens=20, extra_body={"ignore_eos": True})
            wait_for(lambda: list((tmp_path / "snapshots").glob("snapshot-*")))
            # Not the prompt from inside the window: rows of its shared pages were
            # computed at the provisional scale.
            text = complete(client, **another).choices[0].text
            scales, before = serving.scales(), serving.ready()
            stream = complete(client, max_tokens=30, stream=True)
            next(stream)
            assert serving.end(signal.SIGKILL) == -signal.SIGKILL
    assert before["status"] == "frozen"
    with Serving(command) as serving:
        serving.wait_until_accepting()
        assert "restored frozen scales" in serving.said
        assert serving.ready() == before
        assert serving.scales() == scales != []
        with serving.client() as client:
            assert complete(client, **another).choices[0].text == text
        assert serving.end(signal.SIGTERM) == 0, serving.said
    assert serving.said.endswith("stopped\n")
    # Pages of prefixes are saved at an orderly end alone.
    described = next((tmp_path / "snapshots").glob("snapshot-*/snapshot.json"))
    assert '"prefixes":["' in described.read_text()


def test_the_command_builds_what_was_asked_for(monkeypatch, tmp_path):
    served = []
    monkeypatch.setattr(serve, "_serve", lambda *arguments: served.append(arguments))
    monkeypatch.setenv("FP8KV_API_KEY", "secret")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the quick brown fox")
    flags = [*SIZES.split(), "--calibration-prompts", prompts, "--port", 0]
    flags += ["--served-model-name", "fox", "--snapshot", tmp_path / "snapshots"]
    flags += ["--fp8-kv-calibration-tokens", 30, "--ready-when", "frozen"]
    assert run(["serve", "--model", str(TINY), *map(str, flags)]) == 0
    request, bound, engine, model, tokens, snapshots = served[0]
    assert engine.config.max_num_seqs == 4
    assert engine.config.max_seq_len == 64
    assert engine.config.max_tokens_per_step == 68
    assert engine.cache_config.page_size == 8
    assert engine.cache_config.num_pages == 8 * 8
    assert engine.stats().window_tokens == 30
    assert (request.server.api_key, request.server.ready_when) == ("secret", "frozen")
    assert model.name == "fox"
    assert model.render_chat([{"role": "user", "content": "hi"}])
    assert tokens == [list(model.encode("the quick brown fox"))]
    assert snapshots is not None
    assert bound.fileno() == -1, "the port is given back"


def test_a_cpu_has_two_small_steps_and_a_gpu_six(monkeypatch):
    request = types.SimpleNamespace(
        max_num_seqs=None, max_num_batched_tokens=None, compilation_cache=None
    )
    on_cpu = serve._engine_config(request, 4096)
    assert on_cpu.layout(page_size=128).shapes == [(4, 0), (4, 1)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    on_gpu = serve._engine_config(request, 4096)
    assert (on_gpu.max_num_seqs, on_gpu.chunk) == (32, 128)
    assert on_gpu.layout(page_size=128).shapes == [
        *[(8, 0), (8, 1), (8, 4)],
        *[(32, 0), (32, 1), (32, 4)],
    ]


@pytest.fixture
def error_of(capsys):
    """Runs a command line that cannot start; returns its one line."""

    def run_serve(*arguments):
        code = run(["serve", "--model", str(TINY), *map(str, arguments)])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("fp8kv: error: ")
        assert err.count("\n") == 1
        return err

    return run_serve


def test_a_port_in_use_is_one_line(error_of):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = error_of("--port", port)
    assert f"got 127.0.0.1 and {port}: Address already in use" in error


def test_a_host_that_is_not_here_is_one_line(error_of):
    error = error_of("--host", "192.0.2.1", "--port", "0")
    assert "Expected --host and --port to be free to listen on" in error


@pytest.mark.parametrize(
    "content", [None, b"", b"\n", b"two words", b"\xff", b"a" * 5000]
)
def test_a_bad_key_file_is_one_line(error_of, tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    error = error_of("--api-key-file", path)
    assert "Expected --api-key-file to " in error
    assert "words" not in error


def test_an_empty_key_in_the_environment_is_no_open_server(error_of, monkeypatch):
    monkeypatch.setenv("FP8KV_API_KEY", "")
    assert "Expected FP8KV_API_KEY to hold one key" in error_of("--port", "0")


@pytest.mark.parametrize(
    "flag",
    [
        *("--max-num-seqs", "--max-model-len", "--max-num-batched-tokens"),
        *("--num-pages", "--max-open-requests", "--max-body-bytes"),
        *("--body-timeout", "--request-timeout"),
    ],
)
def test_a_limit_of_nothing_is_one_line(error_of, flag):
    assert f"Invalid value for '{flag}'" in error_of(flag, 0)


def test_neither_a_window_nor_scales_is_one_line(error_of):
    error = error_of("--port", 0, "--fp8-kv-calibration-tokens", 0)
    assert "--fp8-kv-calibration-tokens of at least 1 without" in error


def test_a_context_beyond_the_models_is_one_line(error_of):
    error = error_of("--port", 0, "--max-model-len", 65)
    assert "Expected --max-model-len of at most 64" in error


def test_a_model_that_is_not_there_is_one_line(error_of):
    assert "no such file" in error_of("--port", 0, "--model", "/nowhere")


def test_a_damaged_snapshot_is_one_line(error_of, tmp_path):
    place = tmp_path / "snapshot-000001"
    place.mkdir()
    (place / "snapshot.json").write_text("{}")
    error = error_of("--port", 0, "--snapshot", tmp_path)
    assert "remove the snapshot" in error


def test_calibration_prompts_that_are_none_are_one_line(error_of, tmp_path):
    path = tmp_path / "prompts.jsonl"
    assert "prompts.jsonl" in error_of("--port", 0, "--calibration-prompts", path)
    path.write_text("\n")
    error = error_of("--port", 0, "--calibration-prompts", path)
    assert "to hold prompts, got none" in error


def test_calibration_prompts_are_texts_and_conversations(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"text": "hello"}\n{"messages": [{"role": "user", "content": "hello"}]}\n'
    )
    tokenizer = load(TINY, options.ComputeDtype.FLOAT32).tokenizer
    model = load(TINY, options.ComputeDtype.FLOAT32)
    text, conversation = read_calibration_prompts(path, model)
    assert text == tokenizer.encode("hello")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert conversation == tokenizer.encode(rendered)


def test_without_the_extra_the_error_names_it(error_of, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "starlette" else find_spec(name, *rest),
    )
    assert "no starlette: pip install 'fp8kv-jax[serve]'" in error_of("--port", 0)


def test_the_command_line_does_not_import_the_web_framework():
    code = (
        "import sys, fp8kv_jax.cli.main; "
        "print({'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout == "set()\n", result.stderr


@pytest.mark.skipif(
    models.loading.default_model_path() is None,
    reason="the demo model is not installed",
)
def test_the_demo_model_answers_a_question():
    model = load(None, options.ComputeDtype.FLOAT32)
    request = types.SimpleNamespace(
        model=None,
        served_model_name=None,
        max_num_seqs=2,
        max_model_len=64,
        max_num_batched_tokens=66,
        num_pages=4,
        page_size=32,
        kv_cache_dtype=options.KvCacheDtype.FP8,
        calibration=CalibrationConfig(window_tokens=256),
        # A window over few layers compiles in a third of the time.
        high_precision_layers=tuple(range(3, model.config.num_layers)),
        compilation_cache=None,
    )
    engine = serve._make_engine(
        request, model, options.ComputeDtype.FLOAT32, None, None
    )
    served = serve._served(request, model)
    with RunningServer(engine=engine, model=served) as server:
        answer = server.openai().chat.completions.create(
            model=served.name,
            messages=[
                {"role": "user", "content": "What is the capital of France? One word."}
            ],
            temperature=0,
            max_tokens=8,
        )
        assert "Paris" in answer.choices[0].message.content
        ready = server.get("/ready").json()
        assert ready["status"] == "calibrating"
        # The last token is never put into the cache.
        usage = answer.usage
        assert ready["tokens_seen"] == usage.total_tokens - 1
