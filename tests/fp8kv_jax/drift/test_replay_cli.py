"""`fp8kv replay` and `fp8kv scales rebind`: exit codes, files, and the whole story."""

import functools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import models.loading
from fp8kv_jax.cli.main import run
from fp8kv_jax.drift.result import ReplayResult
from fp8kv_jax.scales.artifact import read_artifact

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
_LOAD = models.loading.load_model

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def _load_once(path, dtype):
    return _LOAD(path, jnp.dtype(dtype))


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    """Loads each model once for all tests."""
    monkeypatch.setattr(models.loading, "load_model", _load_once)


@pytest.fixture
def cli(command_line):
    return command_line


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A workload, an artifact calibrated on it, and a model with other weights."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)

    def words(number):
        return " ".join(f"w{i}" for i in rng.integers(0, 99, number))

    lines = [
        {"prompt": words(n % 5 + 3), "class": "prose", "language": "en"}
        for n in range(10)
    ]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    lines += [{"messages": chat, "class": "chat", "expected": "no such answer"}] * 2
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "w.jsonl").write_text(text)
    (folder / "text.txt").write_text("\n".join(x.get("prompt", "hi") for x in lines))
    data = ("--data", f"prose={folder / 'text.txt'}", "--model", str(TINY))
    out = ("--out", str(folder / "scales"), "--granularity", "head", "--headroom", "4")
    assert run(["calibrate", *data, *out]) == 0
    shutil.copytree(TINY, folder / "newer")
    path = folder / "newer" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(name for name in tensors if "mlp" in name or "down" in name)
    tensors[name] = (tensors[name].astype(np.float32) * 1.02).astype(
        tensors[name].dtype
    )
    path.write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    return folder


@pytest.fixture
def scales(files, tmp_path):
    shutil.copytree(files / "scales", tmp_path / "scales")
    return tmp_path / "scales"


def replay(
    cli, files, scales, *more, model=TINY, attribute="none", generate=0, formats="none"
):
    return cli(
        "replay",
        *("--fp8-kv-scales", scales, "--workload", files / "w.jsonl"),
        *("--model", model, "--max-new-tokens", 4, "--tokens-per-step", 128),
        *("--attribute", attribute, "--generate", generate, "--formats", formats),
        *more,
    )


def policy(tmp_path, **thresholds):
    """A policy that a random model meets, but for what is given."""
    path = tmp_path / "policy.json"
    lenient = {"min_top1_agreement": 0.5, "max_perplexity_ratio": 1.5}
    path.write_text(json.dumps({"thresholds": lenient | thresholds, "version": "7"}))
    return path


def test_json_holds_the_whole_result(cli, files, scales, tmp_path):
    more = ("--json", "--attribution-samples", 2, "--attribution-tokens", 16)
    more = (*more, "--policy", policy(tmp_path))
    parts = {"attribute": "heads", "generate": 3, "formats": "int8_token_head,fp8_head"}
    code, out, err = replay(cli, files, scales, *more, **parts)
    assert code == 0, err
    result = ReplayResult.from_json(out)
    assert result.verdict.verdict == "passed"
    assert result.workload.num_samples == 12
    assert [x.name for x in result.workload.classes] == ["prose", "chat"]
    assert result.artifact.artifact_id == read_artifact(scales)[1].artifact_id
    generated = sum(x.num_tokens for x in result.generated.examples)
    assert result.generated.overall.num_prompts == 3
    assert result.generated.overall.num_with_answer == 2
    assert result.generated.overall.accuracy_full == 0
    # A chat that is continued is scored up to its answer, and with what was generated.
    total = result.quality.overall.slice.num_tokens
    assert result.range.overall.slice.num_tokens == total
    names = {x.slice.name: x.slice.num_tokens for x in result.quality.slices}
    assert names["1-16"] == generated
    assert result.attribution.num_samples == 2
    assert result.drifts.kl_saved == result.attribution.kl_mean
    int8, fp8 = result.formats.trials
    assert (int8.name, fp8.name) == ("int8_token_head", "fp8_head")
    assert fp8.code_bytes_per_token == result.capacity.fp8.bytes_per_token
    assert result.formats.num_tokens == result.attribution.num_tokens
    assert int8.kl_mean < fp8.kl_mean
    assert result.capacity.fp8.bytes_per_token * 2 == (
        result.capacity.bf16.bytes_per_token
    )
    assert result.seconds > 0


def test_a_policy_that_is_not_met_ends_with_1(cli, files, scales, tmp_path):
    rules = policy(tmp_path, max_kl_mean=1e-9)
    code, out, err = replay(cli, files, scales, "--policy", rules)
    assert (code, out) == (1, "")
    assert "failed: overall: kl mean" in err
    assert "did not pass this workload" in err
    code, _, err = replay(cli, files, scales, "--policy", policy(tmp_path))
    assert code == 0
    assert "passed: FP8 with one scale a KV head passed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "none.jsonl"], "Expected a readable file, got none.jsonl"),
        (["--policy", "none.toml"], "Expected a readable policy file"),
        (["--fp8-kv-scales", "none"], "none"),
        (["--generate", -1], "Expected --generate of at least 0, got -1."),
        (["--max-prompt-tokens", 0], "--max-prompt-tokens of at least 1, got 0."),
        (["--formats", "fp9"], "Expected --formats all, none, or names among bf16, "),
        (["--top-k", 1], "Expected top_k of at least 2, got 1."),
        (["--report", "no/such/r.html"], "FILE.html in a folder that exists, got no"),
        (["--report", "r.json"], "Expected --report FILE.html in a folder that"),
        (["--kv-high-precision-layers", "9"], "high_precision_layers"),
        (["--kv-high-precision-layers", "0,1"], "Expected a layer in FP8"),
    ],
)
def test_an_error_is_one_line_and_ends_with_2(cli, files, scales, arguments, message):
    code, out, err = replay(cli, files, scales, *arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("fp8kv: error: ")


def test_a_wrong_line_of_the_workload_is_named(cli, scales, tmp_path):
    (tmp_path / "w.jsonl").write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    code, _, err = replay(cli, tmp_path, scales)
    assert code == 2
    assert "in line 2 of" in err


def test_a_new_checkpoint_takes_scales_over_after_a_passing_replay(
    cli, files, scales, tmp_path
):
    newer = files / "newer"
    code, _, err = replay(cli, files, scales, model=newer)
    assert code == 2
    assert "differ in weights" in err

    def rebind():
        return cli(
            "scales", "rebind", scales, "--model", newer, "--out", tmp_path / "b"
        )

    code, _, err = rebind()
    assert code == 2
    assert "found no replay of exactly this model" in err
    reason = ("--allow-mismatch", "a new checkpoint", "--attach-evidence")
    # The old model's own replay proves nothing about the new one.
    rules = ("--policy", policy(tmp_path))
    assert replay(cli, files, scales, *rules, "--attach-evidence")[0] == 0
    rules = ("--policy", policy(tmp_path, max_kl_mean=1e-9))
    assert replay(cli, files, scales, *reason, *rules, model=newer)[0] == 1
    code, _, err = rebind()
    assert "has the verdict 'failed'" in err
    rules = ("--policy", policy(tmp_path))
    code, _, err = replay(cli, files, scales, *reason, *rules, model=newer)
    assert code == 0, err
    assert "note: trigger model: the model's weights is not the artifact's" in err
    code, out, err = rebind()
    assert code == 0, err
    before, after = (read_artifact(x)[1] for x in (scales, tmp_path / "b"))
    assert after.artifact_id in out
    assert after.parent == before.artifact_id
    assert after.scales_sha256 == before.scales_sha256
    assert [e.verdict for e in before.evidence] == ["passed", "failed", "passed"]
    assert [e.verdict for e in after.evidence] == ["passed"]
    assert cli("scales", "verify", tmp_path / "b", "--model", newer)[0] == 0
    code, _, err = rebind()
    assert code == 2
    assert "Expected --out to name a new folder" in err


def write_trace(path, *, loud):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, size in (("probe", 300), ("code/1", 20)):
        rows = rng.normal(size=(2, 2, size, 2, 8)).astype(np.float32)
        if loud and name == "code/1":
            rows[1, 1, 4, 1, :3] = 1e4
        for which, kind in enumerate("kv"):
            tensors[f"{name}.{kind}"] = rows[which].astype(ml_dtypes.bfloat16)
        tensors[f"{name}.tokens"] = np.arange(size, dtype=np.int32)
    path.write_bytes(safetensors.numpy.save(tensors))


@pytest.mark.parametrize("loud", [False, True])
def test_a_trace_shows_its_range_without_a_model(cli, scales, tmp_path, loud):
    shape = read_artifact(scales)[0].k_scale.shape
    assert shape == (2, 2)
    path = tmp_path / "t.safetensors"
    write_trace(path, loud=loud)
    page = tmp_path / "r.html"
    flags = ("--fp8-kv-scales", scales, "--workload", path, "--report", page)
    code, out, err = cli("replay", *flags, "--json")
    result = ReplayResult.from_json(out)
    assert page.with_suffix(".json").read_text() == out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert (result.model, result.quality, result.attribution) == (None, None, None)
    assert result.workload.kind == "trace"
    assert result.range.overall.slice.num_tokens == 320
    clipped = {(x.tensor, x.layer, x.head) for x in result.range.flags}
    by_class = {x.slice.name: x.v.saturated[1][1] for x in result.range.slices[1:3]}
    if loud:
        assert code == 1, err
        assert by_class == {"probe": 0, "code": 3}
        assert ("v", 1, 1) in clipped
    else:
        assert by_class == {"probe": 0, "code": 0}


def test_a_trace_of_another_shape_is_refused(cli, scales, tmp_path):
    rows = np.zeros((2, 4, 3, 8), ml_dtypes.bfloat16)
    path = tmp_path / "t.safetensors"
    path.write_bytes(safetensors.numpy.save({"a.k": rows, "a.v": rows}))
    code, _, err = cli("replay", "--fp8-kv-scales", scales, "--workload", path)
    assert code == 2
    assert "Expected 3 groups" in err
