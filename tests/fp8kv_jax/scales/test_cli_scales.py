"""`fp8kv scales`: inspect, verify, list, add, promote, rollback, remove, diff."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from artifact_examples import (
    NUM_LAYERS,
    evidence,
    manifest_of,
    scale_set,
    write_example,
)

from fp8kv_jax.cli import main
from fp8kv_jax.cli import scales as cli_scales
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.scales_report import diff_table
from fp8kv_jax.scales.artifact import MANIFEST_NAME, add_evidence, write_artifact
from fp8kv_jax.scales.diff import diff_scales, farthest, moved, plot_diff
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet
from models.loading import load_model

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"


@pytest.fixture
def cli(capsys, monkeypatch):
    """Runs `fp8kv scales ...` in this process: exit code, stdout and stderr."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.add_typer(cli_scales.app, name="scales")
    monkeypatch.setattr(main, "app", app)

    def run_cli(*arguments):
        code = main.run(["scales", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run_cli


@pytest.fixture
def cli_json(cli):
    def run_json(*arguments):
        code, out, err = cli(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out, parse_constant=pytest.fail)

    return run_json


@pytest.fixture
def good(cli):
    """Runs a command that must succeed; what it printed, with single spaces."""

    def run_good(*arguments):
        code, out, err = cli(*arguments)
        assert (code, err) == (0, "")
        return re.sub(" +", " ", out)

    return run_good


def one_line_error(code, out, err):
    assert (code, out) == (2, "")
    assert err.startswith("fp8kv: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("fp8kv: error: ")


# inspect and verify


def test_inspect_shows_the_manifest_and_the_scales(good, tmp_path):
    scales, manifest = write_example(tmp_path / "a")
    add_evidence(tmp_path / "a", evidence())
    out = good("inspect", tmp_path / "a")
    assert out.startswith(f"artifact {manifest.artifact_id}, made 2026-01-31T12:00:00Z")
    assert "model: llama, 4 layers of 3 KV heads of 8; weights aaaaaaaaaaaa," in out
    assert "data: files, 30 tokens of 1 file (chat 30)" in out
    assert "recipe: head, rule amax, headroom 2, e4m3fn" in out
    assert "envelope: longest context 16, prompts p50 14 p90 16 p99 16 max 16," in out
    assert "outputs unknown, languages en" in out
    assert "skipped layers: none; no_signal groups: none" in out
    assert f"evidence: drift_replay of {evidence().created_at}: fits" in out
    for value in scales.v_scale[3]:
        assert f"{value:.4g}" in out


def test_inspect_as_json_is_the_manifest_and_the_values(cli_json, tmp_path):
    scales = dataclasses.replace(scale_set(), k_amax=np.full((4, 3), np.nan, "f4"))
    write_artifact(tmp_path / "a", scales, manifest_of(scales))
    found = cli_json("inspect", tmp_path / "a")
    layers = found.pop("layers")
    assert found == json.loads((tmp_path / "a" / MANIFEST_NAME).read_text())
    assert [x["layer"] for x in layers] == list(range(NUM_LAYERS))
    assert layers[2]["v_scale"] == scales.v_scale[2].tolist()
    assert layers[2]["k_amax"] == [None] * 3
    write_example(tmp_path / "b", "tensor")
    assert isinstance(
        cli_json("inspect", tmp_path / "b")["layers"][0]["k_scale"], float
    )


def test_a_warning_about_scales_is_a_line_on_stderr(cli, tmp_path):
    ones = np.ones((NUM_LAYERS, 3), np.float32)
    names = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale")
    scales = dataclasses.replace(scale_set(), **dict.fromkeys(names, ones))
    write_artifact(tmp_path / "a", scales, manifest_of(scales, rule="given"))
    code, _, err = cli("verify", tmp_path / "a")
    assert code == 0
    assert err.startswith("fp8kv: warning: Every scale is exactly 1.0")


@pytest.fixture(scope="module")
def tiny_artifact(tmp_path_factory):
    """Scales that were made for the tiny Llama."""
    model = identify(load_model(TINY, "float32"))
    scales = scale_set("tensor", layers=range(model.num_layers))
    folder = tmp_path_factory.mktemp("tiny") / "a"
    return folder, write_artifact(folder, scales, manifest_of(scales, model=model))


def test_verify_says_that_an_artifact_is_sound_and_whose_it_is(good, tiny_artifact):
    folder, manifest = tiny_artifact
    sound = f"artifact {manifest.artifact_id}: sound"
    assert good("verify", folder) == f"{sound}\n"
    assert good("verify", folder, "--model", TINY) == f"{sound}, made for this model\n"


def test_verify_refuses_another_model_unless_there_is_a_reason(
    cli, cli_json, tiny_artifact, tmp_path
):
    folder, _ = tiny_artifact
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    arguments = ("verify", folder, "--model", tmp_path)
    message = one_line_error(*cli(*arguments))
    assert re.search(
        r"for layers 0, 1: they differ in chat template \(artifact", message
    )
    found = cli_json(*arguments, "--allow-mismatch", "same text")
    [line] = found["allowed_mismatches"]
    assert line.startswith("other model's chat template (artifact ")
    assert line.endswith("; allowed: same text")
    assert found["model_checked"] is True
    message = one_line_error(*cli("verify", folder, "--allow-mismatch", "x"))
    assert "Expected --model with --allow-mismatch" in message


# The registry's commands.


def test_a_life_of_a_registry(good, cli_json, cli, tmp_path):
    registry = tmp_path / "registry"
    ids = [
        write_example(tmp_path / f"{seed}", seed=seed)[1].artifact_id for seed in (0, 1)
    ]
    a, b = ids
    assert good("add", registry, tmp_path / "0") == f"added {a}\n"
    assert good("promote", registry, a[:8]) == f"live: {a} (before: none)\n"
    assert good("promote", registry, tmp_path / "1") == f"live: {b} (before: {a})\n"
    out = good("list", registry)
    assert re.search(
        f"live {b} 2026-01-31 12:00 llama aaaaaaaa head files, 30 tokens", out
    )
    assert re.search(f"previous {a}", out)
    found = cli_json("list", registry)
    assert found["live"] == b
    assert {x["artifact_id"] for x in found["artifacts"]} == set(ids)
    assert found["artifacts"][0]["manifest"]["model"]["architecture"] == "llama"
    assert cli_json("inspect", registry)["artifact_id"] == b
    assert f"{b}, which is live" in one_line_error(*cli("remove", registry, b))
    assert cli_json("rollback", registry) == {"live": a, "before": b}
    assert good("remove", registry, b) == f"removed {b}\n"
    assert "to roll back to, got none" in one_line_error(*cli("rollback", registry))


def test_a_broken_artifact_is_listed_as_such(good, tmp_path):
    registry = tmp_path / "registry"
    name = write_example(tmp_path / "a")[1].artifact_id
    good("add", registry, tmp_path / "a")
    (registry / name / MANIFEST_NAME).write_text("{")
    out = good("list", registry)
    assert "cannot be read" in out
    assert re.search(rf"{name}: .*Expected manifest.json to be JSON", out)


# diff


def scales_of(k, v, layers=None) -> ScaleSet:
    """Scales by layer and group."""
    layers = range(len(k)) if layers is None else layers
    pairs = {
        layer: (np.array(x, np.float32), np.array(y, np.float32))
        for layer, x, y in zip(layers, k, v, strict=True)
    }
    granularity = "head" if len(k[0]) > 1 else "tensor"
    return ScaleSet.from_scales(pairs, granularity=granularity)


def test_a_difference_is_a_ratio_for_each_layer_and_group():
    a = scales_of([[1, 2], [1, 1]], [[1, 1], [1, 1]])
    b = scales_of([[2, 2], [1, 1]], [[1, 0.25], [1, 1.04]])
    first, second = diff_scales(a, b)
    assert first.k_ratio.tolist() == [2, 1]
    assert first.v_ratio.tolist() == [1, 0.25]
    assert first.farthest == 0.25
    assert [moved(x, 0.05) for x in (first, second)] == [True, False]
    assert moved(second, 0.03)
    assert farthest(np.array([0.5, 1.9])) == 0.5


def test_a_scale_for_a_layer_is_compared_with_each_of_its_heads():
    [diff] = diff_scales(scales_of([[1]], [[2]]), scales_of([[1, 3]], [[2, 2]]))
    assert diff.k_ratio.tolist() == [1, 3]
    three = scales_of([[1, 1, 1]], [[1, 1, 1]])
    with pytest.raises(ScaleError, match="one number of KV heads, got 2 and 3 groups"):
        diff_scales(scales_of([[1, 1]], [[1, 1]]), three)


def test_layers_of_one_set_alone_have_moved():
    a = scales_of([[1], [1]], [[1], [1]], layers=(0, 1))
    b = scales_of([[1], [1]], [[1], [1]], layers=(1, 5))
    diffs = diff_scales(a, b)
    assert [(x.layer, x.only_in) for x in diffs] == [(0, "a"), (1, None), (5, "b")]
    assert [moved(x, 0.05) for x in diffs] == [True, False, True]


def test_diff_shows_which_layers_moved_with_bars(good, cli_json, tmp_path):
    scales = scale_set("tensor")
    factor = np.array([[1], [2], [1], [0.01]], np.float32)
    other = dataclasses.replace(
        scales,
        k_scale=scales.k_scale * factor,
        k_inv_scale=scales.k_inv_scale / factor,
        k_amax=scales.k_amax * factor,
    )
    for name, x in (("a", scales), ("b", other)):
        write_artifact(tmp_path / name, x, manifest_of(x))
    out = good("diff", tmp_path / "a", tmp_path / "b")
    assert "2 of 4 layers moved by more than 5 %: 1, 3" in out
    # x 2 is half of the way to x 4, which fills a bar; x 0.01 is far beyond it.
    assert re.search("1 2.0000 │██████ 1.0000 │ moved", out)
    assert re.search("3 0.0100 <███████████│ 1.0000 │ moved", out)
    found = cli_json("diff", tmp_path / "a", tmp_path / "b", "--threshold", 1.5)
    assert found["moved"] == [3]
    assert found["layers"][1]["k_ratio"] == [2.0]
    assert good("diff", tmp_path / "a", tmp_path / "a").endswith(
        "0 of 4 layers moved by more than 5 %\n"
    )


def test_a_layer_of_one_artifact_alone_shows_in_the_table():
    a, b = (scales_of([[1]], [[1]], layers=[i]) for i in (0, 7))
    table = diff_table(diff_scales(a, b), 0.05)
    assert list(table.columns[5].cells) == ["only in A", "only in B"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    a = scales_of([[1, 2], [1, 1], [1, 1]], [[1, 1]] * 3)
    b = scales_of([[2, 2], [1, 1]], [[1, 0.25], [1, 1]], layers=(0, 2))
    path = tmp_path / f"p{suffix}"
    plot_diff(diff_scales(a, b), path, names=("aaaa", "bbbb"))
    starts = {".png": b"\x89PNG", ".svg": b"<?xml"}
    assert path.read_bytes().startswith(starts[suffix])
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_without_matplotlib_the_error_says_what_to_install(cli, monkeypatch, tmp_path):
    write_example(tmp_path / "a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = ("diff", tmp_path / "a", tmp_path / "a", "--plot", tmp_path / "p.png")
    assert "install fp8kv-jax[plot]" in one_line_error(*cli(*arguments))


# What goes wrong.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "Expected nowhere to be an artifact"),
        (["verify", "nowhere"], "Expected nowhere to be an artifact"),
        (["diff", "nowhere", "nowhere"], "Expected nowhere to be an artifact"),
        (["diff", "a", "b", "--plot", "x.pdf"], "to end in .png or .svg, got x.pdf"),
        (["diff", "a", "b", "--threshold", "-1"], "--threshold of 0 or more, got -1"),
        (["list", "nowhere"], "Expected nowhere to be a registry's folder"),
        (
            ["promote", "nowhere", "0123"],
            "Expected nowhere to be a folder of artifacts",
        ),
        (["rollback", "nowhere"], "Expected nowhere to be a folder of artifacts"),
        (["bogus"], "No such command 'bogus'"),
        ([], "Missing command"),
        (["inspect"], "Missing argument 'DIR'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, arguments, message):
    assert message in one_line_error(*cli(*arguments))


def test_a_damaged_artifact_is_one_line(cli, tmp_path):
    write_example(tmp_path / "a")
    (tmp_path / "a" / MANIFEST_NAME).write_text("{}")
    for command in ("inspect", "verify"):
        message = one_line_error(*cli(command, tmp_path / "a"))
        assert "a: Expected manifest.format_version to be 1" in message


def test_a_folder_that_cannot_be_made_is_one_line(cli, tmp_path):
    write_example(tmp_path / "a")
    (tmp_path / "file").write_text("")
    message = one_line_error(*cli("add", tmp_path / "file" / "x", tmp_path / "a"))
    assert "Not a directory" in message
