"""`fp8kv scales import` and `export`: what they write, say and refuse."""

import functools
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from exchange_files import legacy, save, save_json, tensors_of, value_of

from fp8kv_jax.cli import scales_exchange
from fp8kv_jax.scales.artifact import read_artifact
from fp8kv_jax.scales.exports import SCALES_FILE
from fp8kv_jax.scales.imports import import_scales

MODELS = Path(__file__).parents[2] / "models" / "data"
TINY = MODELS / "tiny_llama"  # 2 layers, 2 KV heads
LAYERS = range(2)


@pytest.fixture
def cli(command_line):
    return functools.partial(command_line, "scales")


@pytest.fixture
def artifact(cli, tmp_path):
    """An artifact of scales per tensor for the tiny model."""
    source = save(tmp_path / "source.safetensors", tensors_of(layers=LAYERS))
    code, _, err = cli(
        "import", source, "--model", TINY, "--out", tmp_path / "artifact"
    )
    assert code == 0, err
    return tmp_path / "artifact"


def one_line_error(result):
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("fp8kv: error: ")
    assert err.count("\n") == 1
    return err


# Import.


def test_import_writes_an_artifact_of_the_scales(artifact, tmp_path):
    scales, manifest = read_artifact(artifact)
    wanted, _ = import_scales(
        tmp_path / "source.safetensors", num_layers=2, num_kv_heads=2
    )
    for name in ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale"):
        np.testing.assert_array_equal(getattr(scales, name), getattr(wanted, name))
    assert np.isnan(scales.k_amax).all()
    assert manifest.data.source == "imported"
    assert [file.name for file in manifest.data.files] == ["source.safetensors"]
    assert manifest.recipe.rule == "given"
    assert manifest.model.architecture == "llama"


def test_import_says_what_it_did(cli, tmp_path):
    source = save(tmp_path / "x.safetensors", tensors_of(layers=[1]))
    out = tmp_path / "artifact"
    code, stdout, err = cli("import", source, "--model", TINY, "--out", out)
    assert (code, stdout) == (0, "")
    assert "note: There are no scales for layers 0.\n" in err
    assert "1 of 2 layers have scales, per tensor; wrote" in err
    scales, manifest = read_artifact(out)
    assert scales.layers == (1,)
    assert manifest.skipped_layers == (0,)


def test_import_records_its_notes_in_the_manifest(cli, tmp_path):
    values = {str(layer): value_of(layer, "k") for layer in LAYERS}
    source = save_json(tmp_path / "x.json", legacy({"0": values}))
    options = ("--model", TINY, "--out", tmp_path / "artifact", "--fnuz")
    code, out, _ = cli("import", source, *options, "--json")
    assert code == 0
    result = json.loads(out)
    [evidence] = read_artifact(tmp_path / "artifact")[1].evidence
    assert evidence.kind == "import"
    assert evidence.summary == {
        "source": "x.json",
        "fnuz": True,
        "notes": result["notes"],
    }
    assert len(result["notes"]) == 2
    assert (result["granularity"], result["layers"]) == ("tensor", [0, 1])
    assert result["artifact"]["path"] == str(tmp_path / "artifact")


def test_import_warns_of_scales_that_are_all_one(cli, tmp_path):
    ones = {name: np.ones(1, np.float32) for name in tensors_of(layers=LAYERS)}
    source = save(tmp_path / "x.safetensors", ones)
    code, _, err = cli("import", source, "--model", TINY, "--out", tmp_path / "a")
    assert code == 0
    assert err.count("Every scale is exactly 1.0") == 1
    assert "fp8kv: warning: Every scale is exactly 1.0" in err


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (tensors_of(layers=range(5)), "got some for layers 2, 3, 4"),
        (
            tensors_of("encoder.layers.{layer}.k_scale"),
            "fit none: encoder.layers.0.k_s",
        ),
        (tensors_of(layers=LAYERS, letters="k"), "missing in layers 0, 1"),
        (tensors_of(layers=LAYERS, shape=(4,)), "of the model's 2 KV heads, got (4,)"),
    ],
)
def test_import_refuses_in_one_line_and_writes_nothing(cli, tmp_path, tensors, message):
    source = save(tmp_path / "x.safetensors", tensors)
    result = cli("import", source, "--model", TINY, "--out", tmp_path / "artifact")
    assert message in one_line_error(result)
    assert not (tmp_path / "artifact").exists()


def test_import_refuses_the_scales_of_another_family(cli, tmp_path):
    values = {str(layer): value_of(layer, "k") for layer in LAYERS}
    source = save_json(tmp_path / "x.json", legacy({"0": values}, model_type="qwen2"))
    result = cli("import", source, "--model", TINY, "--out", tmp_path / "artifact")
    assert "model_type 'llama' in x.json, got 'qwen2'" in one_line_error(result)


@pytest.mark.parametrize("source", ["absent.safetensors", "."])
def test_import_looks_for_the_source_before_it_loads_a_model(
    cli, tmp_path, monkeypatch, source
):
    monkeypatch.setattr(scales_exchange, "load", pytest.fail)
    (tmp_path / "empty").mkdir()
    result = cli("import", tmp_path / "empty" / source, "--out", tmp_path / "artifact")
    assert "Expected" in one_line_error(result)


def test_import_replaces_an_artifact_only_when_asked(cli, artifact, tmp_path):
    source = save(tmp_path / "y.safetensors", tensors_of(layers=[0]))
    options = ("--model", TINY, "--out", artifact)
    assert "not to exist" in one_line_error(cli("import", source, *options))
    assert read_artifact(artifact)[0].layers == (0, 1)
    code, _, _ = cli("import", source, *options, "--overwrite")
    assert code == 0
    assert read_artifact(artifact)[0].layers == (0,)


def test_import_does_not_hash_a_file_of_weights(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(scales_exchange, "MAX_HASHED_BYTES", 10)
    source = save(tmp_path / "x.safetensors", tensors_of(layers=LAYERS))
    out = tmp_path / "artifact"
    code, _, err = cli("import", source, "--model", TINY, "--out", out)
    assert code == 0, err
    manifest = read_artifact(out)[1]
    assert manifest.data.files == ()
    assert manifest.evidence[0].summary["source"] == "x.safetensors"


# Export.


@pytest.mark.parametrize("format", ["vllm", "compressed-tensors", "modelopt"])
@pytest.mark.parametrize("model", [[], ["--model", str(TINY)]])
def test_what_is_exported_comes_back(cli, artifact, tmp_path, format, model):
    out = tmp_path / "export"
    code, stdout, err = cli(
        "export", artifact, "--format", format, "--out", out, *model
    )
    assert (code, stdout) == (0, "")
    assert "2 layers: wrote" in err
    scales, _ = read_artifact(artifact)
    got, _ = import_scales(out, num_layers=2, num_kv_heads=2)
    np.testing.assert_array_equal(got.k_scale, scales.k_scale)
    np.testing.assert_array_equal(got.v_scale, scales.v_scale)


def test_export_to_the_old_json_warns_of_what_it_loses(cli, artifact, tmp_path):
    out = tmp_path / "export"
    code, stdout, err = cli(
        "export", artifact, "--format", "legacy-json", "--out", out, "--json"
    )
    assert code == 0
    assert "fp8kv: warning: legacy-json has one number for K and V" in err
    [file] = json.loads(stdout)["files"]
    contents = json.loads(Path(file).read_text())
    assert contents["model_type"] == "llama"


def test_export_in_bf16(cli, artifact, tmp_path):
    out = tmp_path / "export"
    options = ("--format", "vllm", "--out", out, "--dtype", "bf16")
    assert cli("export", artifact, *options)[0] == 0
    tensors = safetensors.numpy.load_file(out / SCALES_FILE)
    assert {x.dtype for x in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_export_checks_a_gguf_models_layers(cli, artifact, tmp_path, monkeypatch):
    class Reader:
        def __init__(self, path):
            names = ["blk.0.attn_k.weight", "blk.1.ffn_up.weight", "token_embd.weight"]
            self.tensors = [type("", (), {"name": name}) for name in names]

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    model = tmp_path / "x.gguf"
    options = ("--format", "vllm", "--out", tmp_path / "export", "--model", model)
    err = one_line_error(cli("export", artifact, *options))
    assert "K projections of layers 1," in err
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", ["absent", "empty", "noise"])
def test_export_refuses_a_model_that_is_none(cli, artifact, tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    out = tmp_path / "export"
    options = ("--format", "vllm", "--out", out, "--model", tmp_path / name)
    err = one_line_error(cli("export", artifact, *options))
    assert "to be a GGUF file or a Hugging Face directory" in err


def test_export_refuses_what_is_no_artifact(cli, tmp_path):
    options = ("--format", "vllm", "--out", tmp_path / "export")
    assert "to be an artifact" in one_line_error(cli("export", tmp_path, *options))


def test_export_refuses_heads_where_there_is_no_place_for_them(cli, tmp_path):
    source = save(tmp_path / "x.safetensors", tensors_of(layers=LAYERS, shape=(2,)))
    artifact = tmp_path / "artifact"
    assert cli("import", source, "--model", TINY, "--out", artifact)[0] == 0
    options = ("--format", "modelopt", "--out", tmp_path / "export")
    err = one_line_error(cli("export", artifact, *options))
    assert "Expected scales per tensor, all that modelopt can hold, got 2" in err


def test_export_keeps_files_that_are_there(cli, artifact, tmp_path):
    out = tmp_path / "export"
    save_json(out / "hf_quant_config.json", {"quantization": {}})
    err = one_line_error(cli("export", artifact, "--format", "modelopt", "--out", out))
    assert "no other hf_quant_config.json" in err
    assert [file.name for file in out.iterdir()] == ["hf_quant_config.json"]


def test_export_says_when_it_cannot_write(cli, artifact, tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "export"
    err = one_line_error(cli("export", artifact, "--format", "vllm", "--out", out))
    assert f"Expected to write {out}" in err


def test_an_unknown_format_is_one_line(cli, artifact, tmp_path):
    err = one_line_error(cli("export", artifact, "--format", "x", "--out", tmp_path))
    assert "'legacy-json'" in err
