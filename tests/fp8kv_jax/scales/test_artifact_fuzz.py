"""Damaged and edited artifacts: an error in one line, or exactly the right scales.

300 cases by default; FP8KV_FUZZ=2000 asks for more.
"""

import json
import os
import shutil
import warnings

import numpy as np
import pytest
import safetensors.numpy
from artifact_examples import (
    NUM_KV_HEADS,
    assert_same_scales,
    evidence,
    reseal,
    write_example,
)
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fp8kv_jax.scales.artifact import (
    MANIFEST_NAME,
    SCALES_NAME,
    add_evidence,
    read_artifact,
)
from fp8kv_jax.scales.scale_set import ScaleError
from fp8kv_jax.scales.tensors import KINDS

CASES = int(os.environ.get("FP8KV_FUZZ", "300"))
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
FILES = st.sampled_from([SCALES_NAME, MANIFEST_NAME])


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """An artifact of each granularity, with something in every field."""
    root = tmp_path_factory.mktemp("originals")
    result = []
    for granularity in ("tensor", "head"):
        scales, _ = write_example(root / granularity, granularity)
        add_evidence(root / granularity, evidence())
        result.append((root / granularity, scales))
    return result


@pytest.fixture
def spoiled(originals, tmp_path):
    """Makes a fresh copy to damage."""

    def copy(index):
        source, scales = originals[index]
        folder = tmp_path / "a"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        return folder, scales

    return copy


def outcome(folder):
    """What reading gave, or None for an error, which must be one short line."""
    message = ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return read_artifact(folder)
        except ScaleError as error:
            message = str(error)
    event("refused")
    assert message.startswith(f"{folder}: Expected ")
    assert "\n" not in message
    assert len(message) < 1000
    return None


def check(folder, scales) -> None:
    """Fails on a wrong load, on another exception, and on a message of two lines."""
    found = outcome(folder)
    if found is not None:
        event("read")
        assert_same_scales(found[0], scales)


@fuzz
@given(index=st.integers(0, 1), name=FILES, data=st.data())
def test_truncated_files(spoiled, index, name, data):
    folder, scales = spoiled(index)
    content = (folder / name).read_bytes()
    size = data.draw(st.integers(0, len(content) - 1))
    (folder / name).write_bytes(content[:size])
    check(folder, scales)


@fuzz
@given(index=st.integers(0, 1), name=FILES, sealed=st.booleans(), data=st.data())
def test_flipped_bytes(spoiled, index, name, sealed, data):
    """With a checksum that fits, values may change too: then only the error counts."""
    folder, scales = spoiled(index)
    content = bytearray((folder / name).read_bytes())
    # Half of the flips in the header, where all the structure is.
    top = data.draw(st.sampled_from([len(content) - 1, 300]))
    places = st.lists(st.integers(0, top), min_size=1, max_size=4, unique=True)
    for place in data.draw(places):
        content[place] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(bytes(content))
    if name == SCALES_NAME and sealed:
        reseal(folder)
        check_structure(folder)
    else:
        check(folder, scales)


def check_structure(folder) -> None:
    """For files that may say something else: it must be read as it stands there."""
    found = outcome(folder)
    if found is None:
        return
    event("read")
    scales, manifest = found
    manifest.check_fits(scales)
    tensors = safetensors.numpy.load_file(folder / SCALES_NAME)
    for row, layer in enumerate(scales.layers):
        for kind in KINDS:
            want = tensors[f"layers.{layer}.{kind}"].reshape(-1)
            np.testing.assert_array_equal(getattr(scales, kind)[row], want)


NAMES = [
    f"layers.{i}.{t}_{kind}"
    for i in range(5)
    for t in "kv"
    for kind in ("scale", "inv_scale", "amax", "zero_point")
]
SHAPES = [
    (),
    (1,),
    (2,),
    (NUM_KV_HEADS,),
    (NUM_KV_HEADS, 1, 1),
    (1, NUM_KV_HEADS),
    (0,),
]
TYPES = [np.float32, np.float64, np.float16, np.int32, np.uint8, np.bool_]


@fuzz
@given(index=st.integers(0, 1), data=st.data())
def test_renamed_reshaped_and_retyped_tensors(spoiled, index, data):
    """With a checksum that fits: what is inside must give the file away."""
    folder, scales = spoiled(index)
    tensors = safetensors.numpy.load_file(folder / SCALES_NAME)
    name = data.draw(st.sampled_from(sorted(tensors)))
    value = tensors[name]
    match data.draw(st.sampled_from(["drop", "rename", "reshape", "retype", "set"])):
        case "drop":
            del tensors[name]
        case "rename":
            new = data.draw(st.one_of(st.sampled_from(NAMES), st.text(max_size=9)))
            del tensors[name]
            tensors[new] = value
        case "reshape":
            shape = data.draw(st.sampled_from(SHAPES))
            tensors[name] = np.resize(value, shape)
        case "retype":
            tensors[name] = value.astype(data.draw(st.sampled_from(TYPES)))
        case "set":
            bad = [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-38, 3e38, 1.0]
            tensors[name] = np.full_like(value, data.draw(st.sampled_from(bad)))
    (folder / SCALES_NAME).write_bytes(safetensors.numpy.save(tensors))
    reseal(folder)
    if "amax" in name:  # an amax that nobody knows is no error
        check_structure(folder)
    else:
        check(folder, scales)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8)
    | st.floats(allow_nan=True) | st.sampled_from(["tensor", "head", "amax", "f" * 64]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=6,
)  # fmt: skip


@fuzz
@given(index=st.integers(0, 1), sealed=st.booleans(), new=JSON, data=st.data())
def test_edited_manifests(spoiled, index, sealed, new, data):
    folder, scales = spoiled(index)
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    target = manifest
    while True:  # walks down to some value
        keys = sorted(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(target[key], dict | list) and target[key]
        if not deeper or data.draw(st.booleans()):
            break
        target = target[key]
    match data.draw(st.sampled_from(["replace", "delete", "add"])):
        case "replace":
            target[key] = new
        case "delete":
            del target[key]
        case "add" if isinstance(target, dict):
            target[data.draw(st.text(max_size=5))] = new
        case "add":
            target.append(new)
    path.write_text(json.dumps(manifest))
    if sealed and "NaN" not in path.read_text() and "Inf" not in path.read_text():
        reseal(folder)
    check(folder, scales)
