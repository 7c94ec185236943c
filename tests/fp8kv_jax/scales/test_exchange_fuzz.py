"""Damaged scale files: an error in one line or the right scales, never wrong ones.

FP8KV_FUZZ sets how many files each test tries.
"""

import json
import os
import re
import struct
import warnings

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from exchange_files import (
    NUM_KV_HEADS,
    NUM_LAYERS,
    legacy,
    tensors_of,
    value_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8kv_jax.scales.exports import SCALES_FILE, export_scales
from fp8kv_jax.scales.imports import import_scales
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet
from fp8kv_jax.scales.spellings import match_name

fuzzed = settings(
    max_examples=int(os.environ.get("FP8KV_FUZZ", "300")),
    deadline=None,
    # Files are written anew for each example.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SPELLINGS = {
    "model.layers.{layer}.self_attn.{letter}_scale": "kv",
    "model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale": "kv",
    "transformer.layers.{layer}.attention.kv_cache_scaling_factor": "k",
}
patterns = st.sampled_from(sorted(SPELLINGS))
shapes = st.sampled_from([(1,), (NUM_KV_HEADS, 1, 1)])


def check(path, *, letters="kv"):
    """Imports a file that may be damaged.

    What loads has the values of `value_of`, and what does not load is named.

    Returns:
      Whether it loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scale_set, notes = import_scales(
                path, num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS
            )
    except ScaleError as error:
        message = str(error)
    else:
        _check_values(scale_set, notes, letters)
        return True
    assert "\n" not in message
    assert 20 < len(message) < 3000
    return False


def _check_values(scale_set, notes, letters):
    for row, layer in enumerate(scale_set.layers):
        for head in range(scale_set.groups):
            assert scale_set.k_scale[row, head] == value_of(layer, letters[0], head)
            assert scale_set.v_scale[row, head] == value_of(layer, letters[1], head)
    missing = sorted(set(range(NUM_LAYERS)) - set(scale_set.layers))
    named = f"There are no scales for layers {', '.join(map(str, missing))}."
    assert (named in notes) == bool(missing)


def letters_of(pattern):
    return "kv" if SPELLINGS[pattern] == "kv" else "kk"


def file_of(pattern, shape=(1,)):
    tensors = tensors_of(pattern, letters=SPELLINGS[pattern], shape=shape)
    return tensors, safetensors.numpy.save(tensors)


def exported(folder):
    pairs = {
        layer: tuple(np.float32([value_of(layer, letter)]) for letter in "kv")
        for layer in range(NUM_LAYERS)
    }
    scale_set = ScaleSet.from_scales(pairs, granularity="tensor")
    export_scales(scale_set, folder, format="vllm")
    return (folder / SCALES_FILE).read_bytes()


def test_undamaged_files_load(tmp_path):
    for pattern in SPELLINGS:
        (tmp_path / "x.safetensors").write_bytes(file_of(pattern)[1])
        assert check(tmp_path / "x.safetensors", letters=letters_of(pattern))
    exported(tmp_path / "ours")
    assert check(tmp_path / "ours")


@fuzzed
@given(pattern=patterns, shape=shapes, data=st.data())
def test_a_cut_file_never_loads(tmp_path, pattern, shape, data):
    _, whole = file_of(pattern, shape)
    length = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / "x.safetensors").write_bytes(whole[:length])
    assert not check(tmp_path / "x.safetensors")


@fuzzed
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_no_changed_byte_of_an_export_gives_wrong_scales(
    tmp_path_factory, position, byte
):
    folder = tmp_path_factory.mktemp("x")
    whole = bytearray(exported(folder))
    whole[position % len(whole)] = byte
    (folder / SCALES_FILE).write_bytes(whole)
    check(folder)


@fuzzed
@given(pattern=patterns, shape=shapes, data=st.data(), byte=st.integers(0, 255))
def test_no_changed_byte_of_a_foreign_header_gives_wrong_scales(
    tmp_path, pattern, shape, data, byte
):
    _, whole = file_of(pattern, shape)
    changed = bytearray(whole)
    # The values of a foreign file are protected by nothing.
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    changed[data.draw(st.integers(0, end - 1))] = byte
    (tmp_path / "x.safetensors").write_bytes(changed)
    check(tmp_path / "x.safetensors", letters=letters_of(pattern))


names = st.text(min_size=1, max_size=60) | st.from_regex(
    r"(vision\.|model\.|)layers\.[0-4]\.(self_attn|attention|mlp)\."
    r"(k|v|kv|q|key)(_proj|_cache|)[._](output_|weight_|)(scale|zero_point)",
    fullmatch=True,
)


@fuzzed
@given(pattern=patterns, data=st.data())
def test_renamed_tensors_never_give_wrong_scales(tmp_path, pattern, data):
    tensors, _ = file_of(pattern)
    renamed = data.draw(st.dictionaries(st.sampled_from(sorted(tensors)), names))
    # Onto a name of another layer: nothing could tell that from the truth.
    tensors = {
        new if (new := renamed.get(name, name)) not in tensors else name: values
        for name, values in tensors.items()
        if not _is_elsewhere(name, renamed.get(name, name))
    }
    (tmp_path / "x.safetensors").write_bytes(safetensors.numpy.save(tensors))
    check(tmp_path / "x.safetensors", letters=letters_of(pattern))


def _is_elsewhere(old, new):
    """Whether a new name says another layer or another of K and V, and says it well."""
    before, after = match_name(old), match_name(new)
    return after is not None and (before.layer, before.role) != (
        after.layer,
        after.role,
    )


reshaped = st.sampled_from(
    [(), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (4,), (4, 1), (1, 4), (4, 1, 1), (2, 2)]
)
dtypes = st.sampled_from(
    [np.float16, np.float64, np.int8, np.int32, np.bool_, ml_dtypes.bfloat16]
)


@fuzzed
@given(pattern=patterns, shape=shapes, data=st.data())
def test_reshaped_and_retyped_tensors_never_give_wrong_scales(
    tmp_path, pattern, shape, data
):
    tensors, _ = file_of(pattern, shape)
    chosen = st.sampled_from(sorted(tensors))
    for name, dtype in data.draw(st.dictionaries(chosen, dtypes)).items():
        tensors[name] = tensors[name].astype(dtype)
    for name, new in data.draw(st.dictionaries(chosen, reshaped)).items():
        if np.prod(new, dtype=int) == tensors[name].size:
            tensors[name] = tensors[name].reshape(new)
    (tmp_path / "x.safetensors").write_bytes(safetensors.numpy.save(tensors))
    check(tmp_path / "x.safetensors", letters=letters_of(pattern))


def old_json():
    layers = {str(layer): value_of(layer, "k") for layer in range(NUM_LAYERS)}
    text = json.dumps(legacy({"0": layers, "1": layers}), separators=(",", ":"))
    return text.encode()


@fuzzed
@given(length=st.integers(0, len(old_json()) - 1))
def test_a_cut_json_never_loads(tmp_path, length):
    (tmp_path / "x.json").write_bytes(old_json()[:length])
    assert not check(tmp_path / "x.json")


def _values_in(text):
    """Where the numbers stand: a changed digit is another number, and no error."""
    numbers = re.finditer(rb"0\.[0-9]+", text)
    return {at for number in numbers for at in range(*number.span())}


@fuzzed
@given(data=st.data(), byte=st.integers(0, 255))
def test_no_changed_byte_of_a_json_gives_wrong_scales(tmp_path, data, byte):
    text = bytearray(old_json())
    values = _values_in(text)
    assert len(values) > 6 * 6  # six numbers
    places = [at for at in range(len(text)) if at not in values]
    text[data.draw(st.sampled_from(places))] = byte
    (tmp_path / "x.json").write_bytes(text)
    check(tmp_path / "x.json", letters="kk")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x),
    max_leaves=6,
)


@fuzzed
@given(
    where=st.sampled_from(
        ["", "model_type", "kv_cache", "dtype", "scaling_factor", "rank", "layer"]
    ),
    value=json_values,
)
def test_any_json_in_any_place_is_refused_or_right(tmp_path, where, value):
    layers = {str(layer): value_of(layer, "k") for layer in range(NUM_LAYERS)}
    contents = legacy({"0": layers})
    holders = {
        "model_type": contents,
        "kv_cache": contents,
        "dtype": contents["kv_cache"],
        "scaling_factor": contents["kv_cache"],
    }
    if where == "":
        contents = value
    elif where == "rank":
        contents["kv_cache"]["scaling_factor"]["0"] = value
    elif where == "layer":
        # A number in its place would be right.
        value = None if type(value) in (int, float) else value
        layers["1"] = value
    else:
        holders[where][where] = value
    (tmp_path / "x.json").write_text(json.dumps(contents))
    loaded = check(tmp_path / "x.json", letters="kk")
    assert not (loaded and where in ("", "rank", "layer", "kv_cache", "scaling_factor"))


@fuzzed
@given(
    name=st.sampled_from(
        ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
    ),
    key=st.sampled_from(
        ["", "quantization_config", "quantization", "kv_cache_scheme", "weight_map"]
    ),
    value=json_values,
)
def test_any_json_beside_scales_is_refused_or_harmless(tmp_path, name, key, value):
    for file in tmp_path.iterdir():
        file.unlink()
    pattern = min(SPELLINGS)
    (tmp_path / "x.safetensors").write_bytes(file_of(pattern)[1])
    contents = {key: value} if key else value
    if key == "kv_cache_scheme":
        contents = {"quantization_config": contents}
    (tmp_path / name).write_text(json.dumps(contents))
    check(tmp_path)


def test_the_check_would_notice_wrong_scales(tmp_path):
    tensors, _ = file_of(min(SPELLINGS))
    first, second = sorted(tensors)[:2]
    tensors[first], tensors[second] = tensors[second], tensors[first]
    (tmp_path / "x.safetensors").write_bytes(safetensors.numpy.save(tensors))
    with pytest.raises(AssertionError):
        check(tmp_path / "x.safetensors")
