"""`fp8kv calibrate`: artifacts of a tiny model, from one process and from several."""

import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import models.loading
from fp8kv_jax.cli.calibrate import parse_source
from fp8kv_jax.cli.errors import UserError
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.scales.artifact import check_against_model, read_artifact
from models.full_attention import full_attention

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
COMMAND = "import sys; from fp8kv_jax.cli.main import run; sys.exit(run(sys.argv[1:]))"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three classes of text: chats, prose and code."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)

    def words(number):
        return " ".join(f"word{i}" for i in rng.integers(0, 10**6, number))

    chats = [
        [
            {"role": "user", "content": words(n % 3 + 2)},
            {"role": "assistant", "content": words(n % 3)},
        ]
        for n in range(20)
    ]
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (folder / "chats.jsonl").write_text("".join(lines))
    (folder / "prose.txt").write_text(words(400))
    (folder / "code" / "deep").mkdir(parents=True)
    for n in range(6):
        path = folder / "code" / ("deep" if n % 2 else "") / f"m{n}.py"
        path.write_text(f"x = {words(n * 3 + 2)!r}\n")
    return folder


@pytest.fixture
def options(data, tmp_path):
    sources = (data / "chats.jsonl", data / "prose.txt", data / "code")
    flags = [flag for path in sources for flag in ("--data", path)]
    return [*flags, "--model", TINY, "--num-samples", 24, "--max-seq-len", 48]


_LOAD = models.loading.load_model


@functools.cache
def _load_once(path, dtype):
    return _LOAD(path, jnp.dtype(dtype))


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    """Loads the model once for all tests: its step compiles once, too."""
    monkeypatch.setattr(models.loading, "load_model", _load_once)


@pytest.fixture
def cli(command_line):
    return functools.partial(command_line, "calibrate")


def one_line_error(code, out, err):
    assert (code, out) == (2, "")
    *notes, error = err.splitlines()
    assert all(x.startswith(("fp8kv: warning: ", "going on after ")) for x in notes)
    assert error.startswith("fp8kv: error: ")
    return error.removeprefix("fp8kv: error: ")


def start(*arguments, devices=1):
    """Starts the command in a process of its own."""
    # Unoptimized code compiles in a third of the time.
    flags = (
        f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0"
    )
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "calibrate", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )


def finish(process):
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    return out, err


def outcome(folder):
    """The bytes of the scales, and the manifest without its date."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["created_at"]
    return (folder / "scales.safetensors").read_bytes(), manifest


# One process.


def test_all_that_is_there_is_used_and_reported(cli, options, tmp_path):
    # 20 chats, the prose in stretches, 6 files.
    arguments = [*options, "--num-samples", 999, "--json"]
    code, out, err = cli(*arguments, "--out", tmp_path / "a")
    assert code == 0, err
    scales, manifest = read_artifact(tmp_path / "a")
    summary = json.loads(out)
    num_samples = summary["data"]["num_samples"]
    assert f"gives {num_samples} of the 999 samples asked for" in err
    assert summary["artifact"]["id"] == manifest.artifact_id
    assert summary["data"]["classes"]["code"]["samples"] == 6
    assert summary["data"]["classes"]["chat"]["samples"] == 20
    assert summary["data"]["passages"] == num_samples
    assert (scales.k_amax > 0).all()


def amax_of(model, ids):
    """Amax of one text by layer and head, straight from the model."""
    found = np.zeros((2, 2, 2), np.float32)

    def look(carry, layer, q, k, v, **attention):
        return full_attention([*carry, (k, v)], layer, q, k, v, **attention)

    ids = jnp.asarray([ids], jnp.int32)
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    _, rows = model.forward(model.params, ids, positions, look, [])
    for layer, pair in enumerate(rows):
        for which, x in enumerate(pair):
            found[which, layer] = np.abs(np.asarray(x)).max(axis=(0, 1, 3))
    return found


def test_chats_reach_together_what_the_largest_reaches_alone(cli, tmp_path):
    chats = [[{"role": "user", "content": f"hi {i}"}] for i in range(9)]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    model = _load_once(TINY, "float32")
    render = model.tokenizer.apply_chat_template
    texts = [render(chat, add_generation_prompt=False) for chat in chats]
    want = np.max([amax_of(model, model.tokenizer.encode(t)) for t in texts], axis=0)
    arguments = ("--data", path, "--model", TINY, "--granularity", "head")
    code, _, err = cli(*arguments, "--out", tmp_path / "a", "--dtype", "float32")
    assert code == 0, err
    scales, _ = read_artifact(tmp_path / "a")
    # Rounded to BF16, half a step of 2^-8, and summed in another order.
    np.testing.assert_allclose(scales.k_amax, want[0], rtol=2**-8)
    np.testing.assert_allclose(scales.v_amax, want[1], rtol=2**-8)


def test_the_artifact_is_for_the_model_that_ran(cli, options, tmp_path):
    assert cli(*options, "--out", tmp_path / "a")[0] == 0
    scales, manifest = read_artifact(tmp_path / "a")
    identity = identify(_load_once(TINY, "bfloat16"))
    assert check_against_model(scales, manifest, identity) == []


def test_the_manifest_says_what_was_asked(cli, options, tmp_path):
    arguments = (*options, "--seed", 7, "--headroom", 1.5)
    code, out, err = cli(
        *arguments, "--kv-high-precision-layers", 0, "--out", tmp_path / "a"
    )
    assert (code, out) == (0, "")
    scales, manifest = read_artifact(tmp_path / "a")
    assert scales.layers == (1,)
    assert manifest.skipped_layers == (0,)
    assert manifest.recipe.headroom == 1.5
    assert manifest.recipe.rule == "amax"
    assert (manifest.data.seed, manifest.data.max_length) == (7, 48)
    assert manifest.data.num_samples == 24
    assert manifest.envelope.classes == ("chat", "text", "code")
    assert manifest.envelope.longest_context == 48
    assert "24 samples" in err
    assert manifest.artifact_id in err
    assert not (tmp_path / "a.running").exists()


def test_granularity_and_headroom_can_change_between_kill_and_resume(
    cli, options, tmp_path
):
    # What is saved are amax by head: what follows from them is made at the end.
    work = ("--work-dir", tmp_path / "w")
    assert cli(*options, *work, "--out", tmp_path / "a", "--json")[0] == 0
    other = ("--granularity", "head", "--headroom", 1.0)
    code, out, err = cli(*options, *work, *other, "--out", tmp_path / "b", "--json")
    assert code == 0, err
    assert json.loads(out)["resumed_samples"] == 24
    a, b = (read_artifact(tmp_path / name)[0] for name in "ab")
    assert np.array_equal(b.k_amax.max(axis=1, keepdims=True), a.k_amax)


# The same bytes.


def test_a_run_that_found_its_own_artifact_is_content(cli, options, tmp_path):
    # As after a kill between writing the artifact and removing the state.
    arguments = (*options, "--out", tmp_path / "a", "--work-dir", tmp_path / "w")
    assert cli(*arguments)[0] == 0
    before = (tmp_path / "a" / "manifest.json").read_bytes()
    assert cli(*arguments)[0] == 0
    assert (tmp_path / "a" / "manifest.json").read_bytes() == before
    error = one_line_error(*cli(*arguments, "--headroom", 3))
    assert "holds another artifact; --overwrite replaces it" in error
    assert cli(*arguments, "--headroom", 3, "--overwrite")[0] == 0
    assert read_artifact(tmp_path / "a")[1].recipe.headroom == 3


def test_any_number_of_devices_and_processes_gives_the_same_bytes(options, tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    together = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", 2]
    # 24 samples of 4 lengths, so that 2 and 8 devices get incomplete groups too.
    options = [*options, "--save-every", 3, "--json"]
    runs = {
        f"d{n}": start(*options, "--out", tmp_path / f"d{n}", devices=n)
        for n in (1, 2, 8)
    }
    out = [*options, "--out", tmp_path / "p2", *together]
    pair = [start(*out, "--process-id", i, devices=2) for i in (0, 1)]
    for process in runs.values():
        finish(process)
    summaries = [finish(process)[0] for process in pair]
    want = outcome(tmp_path / "d1")
    for name in ("d2", "d8", "p2"):
        assert outcome(tmp_path / name) == want
    # The first process alone speaks, and its stdout is one JSON object.
    assert summaries[1] == ""
    assert (
        json.loads(summaries[0])["data"]["num_tokens"] == want[1]["data"]["tokens_seen"]
    )


@pytest.mark.slow
def test_a_killed_run_goes_on_with_more_devices_to_the_same_bytes(options, tmp_path):
    finish(start(*options, "--out", tmp_path / "want"))
    arguments = [*options, "--save-every", 1, "--out", tmp_path / "a", "--json"]
    process = start(*arguments)
    states = tmp_path / "a.running" / "states"
    while process.poll() is None and len(saved(states)) < 2:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert saved(states)
    out, _ = finish(start(*arguments, devices=2))
    assert outcome(tmp_path / "a") == outcome(tmp_path / "want")
    assert json.loads(out)["resumed_samples"] > 0


def saved(states):
    if not states.exists():
        return []
    return [path.name for path in states.iterdir() if path.name.isdigit()]


# What goes wrong.


def test_the_state_of_another_run_is_refused(cli, options, tmp_path):
    work = ("--work-dir", tmp_path / "w")
    assert cli(*options, *work, "--out", tmp_path / "a")[0] == 0
    arguments = (*options, *work, "--seed", 1, "--out", tmp_path / "b")
    error = one_line_error(*cli(*arguments))
    assert "with another seed: use --no-resume to start over" in error
    code, out, err = cli(*arguments, "--no-resume", "--json")
    assert code == 0, err
    assert json.loads(out)["resumed_samples"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-samples", 0], "Expected --num-samples of at least 1, got 0."),
        (["--batch-size", 0], "Expected --batch-size of at least 1, got 0."),
        (["--data", "nowhere.txt"], "Expected --data to name a file or a folder"),
        (["--data", "x=nowhere.txt"], "got 'x=nowhere.txt'"),
        (["--rule", "median"], "--rule"),
        (["--headroom", "nan"], "Expected headroom to be a finite number"),
        (["--kv-high-precision-layers", "0,1"], "names all 2"),
        (["--kv-high-precision-layers", "7"], "within 0 to 1, the model's layers"),
        (["--kv-high-precision-layers", "x"], "or layer indices such as"),
        (["--num-processes", 2], "Expected a coordinator"),
        (["--model", "nowhere"], "nowhere: no such file or directory"),
    ],
)
def test_a_wrong_option_is_one_line(cli, options, tmp_path, arguments, message):
    result = cli(*options, "--out", tmp_path / "a", *arguments)
    assert message in one_line_error(*result)
    assert not (tmp_path / "a").exists()


def test_an_existing_folder_is_not_written_into(cli, options, tmp_path):
    (tmp_path / "a").mkdir()
    for flags in ([], ["--overwrite"]):
        error = one_line_error(*cli(*options, "--out", tmp_path / "a", *flags))
        assert "Expected --out to name a new folder" in error


def test_the_state_must_not_lie_in_the_artifact(cli, options, tmp_path):
    work = ("--work-dir", tmp_path / "a" / "w")
    error = one_line_error(*cli(*options, "--out", tmp_path / "a", *work))
    assert "Expected --work-dir outside of --out" in error


def test_data_without_text_is_an_error(cli, tmp_path):
    (tmp_path / "x.txt").write_text("\n")
    arguments = ("--model", TINY, "--data", tmp_path / "x.txt")
    error = one_line_error(*cli(*arguments, "--out", tmp_path / "a"))
    assert error.startswith("Expected text in the data, found none in ")


def test_a_damaged_line_is_one_line(cli, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"messages": [}\n')
    arguments = ("--model", TINY, "--data", tmp_path / "x.jsonl")
    error = one_line_error(*cli(*arguments, "--out", tmp_path / "a"))
    assert error.startswith("Expected JSON in line 1 of ")


def test_a_context_longer_than_the_models_is_cut_with_a_warning(cli, options, tmp_path):
    flags = ("--max-seq-len", 2048, "--out", tmp_path / "a")
    code, _, err = cli(*options, *flags)
    assert code == 0
    assert "fp8kv: warning: --max-seq-len is set to 64, the model's context." in err
    assert read_artifact(tmp_path / "a")[1].data.max_length == 64


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("a.txt", "text", "text"),
        ("a.jsonl", "chat", "jsonl"),
        ("folder", "code", "folder"),
        ("law=a.txt", "law", "text"),
        ("law=folder", "law", "folder"),
        ("odd=name.txt", "text", "text"),
    ],
)
def test_a_source_is_a_path_with_or_without_a_class(
    tmp_path, monkeypatch, text, name, kind
):
    monkeypatch.chdir(tmp_path)
    for file in ("a.txt", "a.jsonl", "odd=name.txt"):
        Path(file).write_text("x")
    Path("folder").mkdir()
    source = parse_source(text)
    assert (source.class_name, source.kind) == (name, kind)


def test_a_source_needs_a_name_before_the_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    with pytest.raises(UserError, match="Expected a name before the ="):
        parse_source("=a.txt")
