"""Small artifacts that the tests of this folder start from."""

import hashlib
import json

import numpy as np
import safetensors.numpy

from fp8kv_jax.scales.artifact import MANIFEST_NAME, SCALES_NAME, write_artifact
from fp8kv_jax.scales.fields import canonical_json
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.manifest import (
    DataFile,
    DataManifest,
    Envelope,
    Evidence,
    Percentiles,
    make_manifest,
)
from fp8kv_jax.scales.scale_set import ScaleSet

NUM_LAYERS, NUM_KV_HEADS = 4, 3
SCALE_PER_AMAX = np.float32(2.0 / 448)
CREATED_AT = "2026-01-31T12:00:00Z"


def identity(**changes) -> ModelIdentity:
    fields = {
        "architecture": "llama",
        "num_layers": NUM_LAYERS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": 8,
        "config_sha256": "c" * 64,
        "weights_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "chat_template_sha256": None,
    }
    return ModelIdentity(**(fields | changes))


def scale_set(
    granularity="head", layers=range(NUM_LAYERS), seed=0, zeros=()
) -> ScaleSet:
    """Scales that follow from a random amax; `zeros` are (tensor, row, group)."""
    rng = np.random.default_rng(seed)
    groups = NUM_KV_HEADS if granularity == "head" else 1
    arrays = {}
    for name in "kv":
        amax = rng.lognormal(size=(len(layers), groups)).astype(np.float32)
        for tensor, row, group in zeros:
            if tensor == name:
                amax[row, group] = 0
        scale = np.where(amax > 0, amax * SCALE_PER_AMAX, np.float32(2))
        arrays[f"{name}_amax"] = amax
        arrays[f"{name}_scale"] = scale
        arrays[f"{name}_inv_scale"] = np.float32(1) / scale
    return ScaleSet(layers=tuple(layers), granularity=granularity, **arrays)


def manifest_of(scales, *, model=None, **changes):
    """A manifest with something in every field."""
    file = DataFile(name="a.jsonl", sha256="d" * 64, num_bytes=9, data_class="chat")
    data = DataManifest(
        source="files",
        files=(file,),
        classes={"chat": {"samples": 2, "tokens": 30}},
        num_samples=2,
        tokens_seen=30,
        seed=7,
        max_length=16,
    )
    envelope = Envelope(
        longest_context=16,
        prompt_lengths=Percentiles.of([14, 16]),
        output_lengths=None,
        classes=("chat",),
        languages=("en",),
    )
    fields = {
        "data": data,
        "envelope": envelope,
        "headroom": 2.0,
        "parent": "0123456789abcdef",
        "created_at": CREATED_AT,
    }
    return make_manifest(scales, model or identity(), **(fields | changes))


def evidence(**changes) -> Evidence:
    fields = {
        "kind": "drift_replay",
        "created_at": CREATED_AT,
        "verdict": "fits",
        "summary": {"saturated": 0, "layers": [1, 2]},
    }
    return Evidence(**(fields | changes))


def write_example(folder, granularity="head", seed=0, **changes):
    """Writes an artifact; returns its scales and its manifest."""
    scales = scale_set(granularity, seed=seed)
    return scales, write_artifact(folder, scales, manifest_of(scales, **changes))


def assert_same_scales(one: ScaleSet, other: ScaleSet) -> None:
    """Bit for bit, NaN included."""
    assert (one.layers, one.granularity) == (other.layers, other.granularity)
    for name in (
        "k_scale",
        "v_scale",
        "k_inv_scale",
        "v_inv_scale",
        "k_amax",
        "v_amax",
    ):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype == np.float32
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


def reseal(folder) -> None:
    """Makes checksum and id fit what the folder holds, as another producer would."""
    value = json.loads((folder / MANIFEST_NAME).read_bytes())
    data = (folder / SCALES_NAME).read_bytes()
    value["scales_sha256"] = hashlib.sha256(data).hexdigest()
    left_out = ("artifact_id", "evidence", "library_versions", "created_at")
    covered = {k: x for k, x in value.items() if k not in left_out}
    digest = hashlib.sha256(canonical_json(covered).encode()).hexdigest()
    value["artifact_id"] = digest[:16]
    (folder / MANIFEST_NAME).write_text(json.dumps(value))


def change_tensors(folder, change) -> None:
    """Changes the tensors of an artifact, and makes checksum and id fit."""
    path = folder / SCALES_NAME
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    path.write_bytes(safetensors.numpy.save(tensors))
    reseal(folder)


def change_manifest(folder, change) -> None:
    """Changes the manifest's JSON, and makes the id fit."""
    path = folder / MANIFEST_NAME
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))
    reseal(folder)
