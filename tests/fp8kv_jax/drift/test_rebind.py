"""Evidence of a replay, and the proof it is for binding scales to a new checkpoint."""

import dataclasses

import numpy as np
import pytest
import result_examples as example

from fp8kv_jax.drift.result_evidence import find_proof, make_evidence, rebind
from fp8kv_jax.scales.artifact import add_evidence, read_artifact, write_artifact
from fp8kv_jax.scales.manifest import DataManifest, make_manifest
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

NEW_MODEL = example.identity(weights_sha256="9" * 64)


@pytest.fixture
def artifact(tmp_path):
    """An artifact of the old model."""
    amax = np.ones((example.LAYERS, example.HEADS), np.float32)
    scales = ScaleSet.from_scales(
        {i: (amax[i] / 100, amax[i] / 50) for i in range(example.LAYERS)},
        granularity="head",
    )
    manifest = make_manifest(
        scales,
        example.identity(),
        data=DataManifest(source="imported"),
        headroom=None,
        rule="given",
    )
    write_artifact(tmp_path / "a", scales, manifest)
    return tmp_path / "a"


def attach(folder, *, model=NEW_MODEL, word="passed", sha256=None, **settings):
    _, manifest = read_artifact(folder)
    record = example.artifact(scales_sha256=sha256 or manifest.scales_sha256)
    result = example.result(
        model=model,
        artifact=record,
        verdict=example.verdict(word),
        settings=example.settings(**settings),
    )
    return add_evidence(folder, make_evidence(result))


def test_evidence_says_for_which_model_scales_policy_and_workload(artifact):
    manifest = attach(artifact)
    summary = manifest.evidence[-1].summary
    assert manifest.evidence[-1].verdict == "passed"
    assert summary["model"] == dataclasses.asdict(NEW_MODEL)
    assert summary["scales_sha256"] == manifest.scales_sha256
    assert summary["policy"]["version"] == "1"
    assert summary["workload"]["sha256"] == example.workload().sha256
    assert summary["figures"]["kl_mean"] == 0.004
    assert summary["envelope"] == example.verdict().envelope


def test_a_passing_replay_binds_the_scales_to_the_new_model(artifact, tmp_path):
    old_scales, old = read_artifact(artifact)
    attach(artifact)
    scales, manifest = read_artifact(artifact)
    write_artifact(tmp_path / "b", scales, rebind(scales, manifest, NEW_MODEL))
    new_scales, new = read_artifact(tmp_path / "b")
    assert new.model == NEW_MODEL
    assert new.parent == old.artifact_id
    assert new.artifact_id != old.artifact_id
    assert new.scales_sha256 == old.scales_sha256
    assert [e.verdict for e in new.evidence] == ["passed"]
    np.testing.assert_array_equal(new_scales.k_scale, old_scales.k_scale)


@pytest.mark.parametrize(
    ("attached", "message"),
    [
        ([], "found no replay of exactly this model and these scales"),
        ([{"model": example.identity()}], "found no replay of exactly this model"),
        ([{"model": None}], "found no replay of exactly this model"),
        ([{"sha256": "0" * 64}], "found no replay of exactly .* these scales"),
        ([{"word": "failed"}], "to have passed, but .* has the verdict 'failed'"),
        ([{}, {"word": "failed"}], "to have passed, but .* has the verdict 'failed'"),
        ([{"high_precision_layers": (0, 2)}], "kept layers 0, 2 in high precision"),
    ],
)
def test_without_a_passing_replay_on_that_model_nothing_is_bound(
    artifact, attached, message
):
    for changes in attached:
        attach(artifact, **changes)
    scales, manifest = read_artifact(artifact)
    with pytest.raises(ScaleError, match=message):
        rebind(scales, manifest, NEW_MODEL)


def test_a_later_pass_outweighs_a_failure(artifact):
    attach(artifact, word="failed")
    manifest = attach(artifact)
    assert find_proof(manifest, NEW_MODEL).verdict == "passed"


def test_the_model_it_is_bound_to_already_is_refused(artifact):
    scales, manifest = read_artifact(artifact)
    with pytest.raises(ScaleError, match="Expected another model than the artifact's"):
        rebind(scales, manifest, example.identity())


def test_a_model_of_another_shape_is_refused(artifact):
    scales, manifest = read_artifact(artifact)
    with pytest.raises(ScaleError, match="Expected 4 groups"):
        rebind(scales, manifest, example.identity(num_kv_heads=4))
