"""`fp8kv generate --fp8-kv-scales`: no window, the artifact's scales, or one clear line."""

import json
from pathlib import Path

import numpy as np
import pytest
from artifact_examples import manifest_of
from artifact_examples import scale_set as example_scales

from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.main import run
from fp8kv_jax.scales.artifact import write_artifact
from fp8kv_jax.scales.registry import Registry
from fp8kv_jax.scales.scale_set import ScaleSet
from models.loading import load_model

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
PROMPT = "one two three"


@pytest.fixture(scope="module")
def tiny_identity():
    return identify(load_model(TINY, "bfloat16"))


@pytest.fixture
def generate(capsys):
    def call(*arguments):
        command = ["generate", PROMPT, "--model", str(TINY), "--max-new-tokens", "4"]
        code = run([*command, *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


def make_artifact(folder, identity, layers=(0, 1), granularity="tensor"):
    groups = identity.num_kv_heads if granularity == "head" else 1
    rows = {i: (np.full(groups, 0.05 + i), np.full(groups, 0.07)) for i in layers}
    scales = ScaleSet.from_scales(rows, granularity=granularity)
    manifest = manifest_of(scales, model=identity, rule="given")
    return write_artifact(folder, scales, manifest)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_scales_of_an_artifact_serve_without_a_window(
    generate, tiny_identity, tmp_path, granularity
):
    written = make_artifact(tmp_path / "a", tiny_identity, granularity=granularity)
    code, result, err = generate("--fp8-kv-scales", tmp_path / "a")
    assert code == 0, err
    calibration = result["calibration"]
    assert calibration["static_scales"]["artifact_id"] == written.artifact_id
    assert calibration["frozen"] is None
    assert calibration["tokens_seen"] == 0
    scales = np.array([x["k_scale"] for x in calibration["layers"]], np.float32)
    np.testing.assert_allclose(scales.reshape(2, -1)[:, 0], [0.05, 1.05], rtol=1e-6)
    assert "not frozen" not in err


def test_the_live_artifact_of_a_registry_serves(generate, tiny_identity, tmp_path):
    written = make_artifact(tmp_path / "a", tiny_identity)
    registry = Registry(tmp_path / "registry")
    registry.promote(registry.add(tmp_path / "a"))
    code, result, err = generate("--fp8-kv-scales", tmp_path / "registry")
    assert code == 0, err
    static = result["calibration"]["static_scales"]
    assert static["artifact_id"] == written.artifact_id


def test_row_36_layers_without_scales_stay_wide_or_calibrate(
    generate, tiny_identity, tmp_path
):
    make_artifact(tmp_path / "a", tiny_identity, layers=(1,))
    arguments = ("--fp8-kv-scales", tmp_path / "a")
    code, result, err = generate(*arguments)
    assert code == 0, err
    assert "none for layers 0" in err
    assert result["calibration"]["layers"][0]["k_scale"] is None
    assert result["calibration"]["static_scales"]["uncovered_layers"] == [0]
    online = ("--fp8-kv-uncovered-layers", "online", "--fp8-kv-calibration-tokens", "4")
    code, result, err = generate(*arguments, *online)
    assert code == 0, err
    assert result["calibration"]["frozen"] is True
    first, second = (x["k_scale"] for x in result["calibration"]["layers"])
    assert first not in (None, 2.0)
    assert second == pytest.approx(1.05)


def test_another_models_scales_are_refused_unless_a_reason_is_given(
    generate, tiny_identity, tmp_path
):
    other = type(tiny_identity)(
        **(vars_of(tiny_identity) | {"weights_sha256": "f" * 64})
    )
    make_artifact(tmp_path / "a", other)
    code, result, err = generate("--fp8-kv-scales", tmp_path / "a")
    assert (code, result) == (2, None)
    assert err.startswith("fp8kv: error: Expected scales of this model")
    assert "weights" in err
    code, result, err = generate(
        "--fp8-kv-scales", tmp_path / "a", "--allow-mismatch", "same but for a merge"
    )
    assert code == 0, err
    (line,) = result["calibration"]["static_scales"]["allowed_mismatches"]
    assert "same but for a merge" in line


def vars_of(identity):
    return {name: getattr(identity, name) for name in identity.__dataclass_fields__}


def test_scales_of_another_size_are_refused_for_any_reason(
    generate, tiny_identity, tmp_path
):
    scales = example_scales("tensor")
    write_artifact(tmp_path / "a", scales, manifest_of(scales))
    code, _, err = generate(
        "--fp8-kv-scales", tmp_path / "a", "--allow-mismatch", "please"
    )
    assert code == 2
    assert "layers 2, 3" in err


def test_scales_frozen_online_serve_the_next_run(generate, tmp_path):
    saved = tmp_path / "saved"
    window = ("--fp8-kv-calibration-tokens", "4")
    code, first, err = generate(*window, "--save-fp8-kv-scales", saved)
    assert code == 0, err
    code, second, err = generate("--fp8-kv-scales", saved)
    assert code == 0, err
    for a, b in zip(
        first["calibration"]["layers"], second["calibration"]["layers"], strict=True
    ):
        assert (a["k_scale"], a["v_scale"]) == (b["k_scale"], b["v_scale"])


def test_scales_that_never_froze_are_not_saved(generate, tmp_path):
    code, _, err = generate("--save-fp8-kv-scales", tmp_path / "saved")
    assert code == 2
    assert "Expected frozen scales" in err
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fp8-kv-scales", "nowhere"], "nowhere to be an artifact"),
        (["--allow-mismatch", "x"], "Expected --fp8-kv-scales with"),
        (["--save-fp8-kv-scales", "tests"], "to name a new folder"),
        (
            ["--fp8-kv-scales", "a", "--kv-cache-dtype", "bf16"],
            "Expected --kv-cache-dtype fp8",
        ),
    ],
)
def test_flags_that_make_no_sense_are_one_line(generate, arguments, message):
    code, _, err = generate(*arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
