"""Exporting scales: names, recipes, rounding, round trips, and what is refused."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8kv_jax.calibration import SCALE_MAX, SCALE_MIN
from fp8kv_jax.scales import exports, files
from fp8kv_jax.scales.exports import (
    SCALES_FILE,
    export_scales,
    export_tensors,
    round_up_to_bf16,
)
from fp8kv_jax.scales.imports import import_scales
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

FORMATS = ("vllm", "compressed-tensors", "modelopt", "legacy-json")
HOLD_HEADS = ("vllm", "compressed-tensors")
PAIRS = [(format, "tensor") for format in FORMATS] + [(x, "head") for x in HOLD_HEADS]
NUM_LAYERS, NUM_KV_HEADS = 5, 4


def some_scales(granularity="tensor", *, layers=(0, 2, 3), seed=0, equal=False):
    """Scales over the whole range that is allowed."""
    rng = np.random.default_rng(seed)
    groups = 1 if granularity == "tensor" else NUM_KV_HEADS
    pairs = {}
    for layer in layers:
        k, v = np.exp2(rng.uniform(-99, 99, (2, groups))).astype(np.float32)
        pairs[layer] = (k, k if equal else v)
    return ScaleSet.from_scales(pairs, granularity=granularity)


def back(folder, **options):
    sizes = {"num_layers": NUM_LAYERS, "num_kv_heads": NUM_KV_HEADS}
    return import_scales(folder, **(sizes | options))[0]


def layer_names(layers, stem="model.layers.{}.self_attn."):
    tails = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "k_norm.weight")
    return [stem.format(layer) + tail for layer in layers for tail in tails]


# Round trips.


@pytest.mark.parametrize(("format", "granularity"), PAIRS)
def test_a_round_trip_in_float32_is_exact(tmp_path, granularity, format):
    scales = some_scales(granularity, equal=format == "legacy-json")
    export_scales(scales, tmp_path, format=format)
    got = back(tmp_path)
    assert (got.layers, got.granularity) == (scales.layers, granularity)
    for name in ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale"):
        np.testing.assert_array_equal(getattr(got, name), getattr(scales, name))


@pytest.mark.parametrize(("format", "granularity"), PAIRS)
def test_a_round_trip_in_bf16_gives_the_scales_rounded_up(
    tmp_path, granularity, format
):
    scales = some_scales(granularity, equal=format == "legacy-json")
    export_scales(scales, tmp_path, format=format, dtype="bf16")
    got = back(tmp_path)
    for name in ("k_scale", "v_scale"):
        wanted = round_up_to_bf16(getattr(scales, name)).astype(np.float32)
        assert (wanted > getattr(scales, name)).any()
        np.testing.assert_array_equal(getattr(got, name), wanted)


@pytest.mark.parametrize("format", FORMATS)
def test_equal_scales_give_equal_bytes(tmp_path, format):
    scales = some_scales(equal=True)
    for name in ("a", "b"):
        export_scales(scales, tmp_path / name, format=format)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_scales_survive_the_names_of_any_format(tmp_path_factory, data):
    format = data.draw(st.sampled_from(FORMATS))
    heads = format in HOLD_HEADS and data.draw(st.booleans())
    layers = data.draw(st.sets(st.integers(0, NUM_LAYERS - 1), min_size=1))
    number = st.floats(SCALE_MIN, SCALE_MAX, width=32)
    row = (
        st.lists(number, min_size=4, max_size=4) if heads else number.map(lambda x: [x])
    )
    pairs = {
        i: (np.float32(data.draw(row)), np.float32(data.draw(row))) for i in layers
    }
    if format == "legacy-json":
        pairs = {layer: (k, k) for layer, (k, _) in pairs.items()}
    scales = ScaleSet.from_scales(pairs, granularity="head" if heads else "tensor")
    folder = tmp_path_factory.mktemp("x")
    export_scales(scales, folder, format=format)
    # Scales of 1 alone load with a warning, which is an error here.
    if (scales.k_scale == 1).all() and (scales.v_scale == 1).all():
        return
    got = back(folder)
    assert got.layers == scales.layers
    np.testing.assert_array_equal(got.k_scale, scales.k_scale)
    np.testing.assert_array_equal(got.v_scale, scales.v_scale)


# Rounding.


def test_rounding_to_bf16_never_goes_down_near_any_bf16():
    """Every positive finite bfloat16, and its float32 neighbours on both sides."""
    upper = np.arange(1, 0x7F7F, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF):
        bits = upper + np.uint32(lower)
        exact, rounded = bits.view(np.float32), round_up_to_bf16(bits.view(np.float32))
        assert rounded.dtype == ml_dtypes.bfloat16
        wide = rounded.astype(np.float32)
        assert (wide >= exact).all()
        # And no further than it has to.
        below = (rounded.view(np.uint16) - np.uint16(1)).view(ml_dtypes.bfloat16)
        assert (below.astype(np.float32) < exact).all()
        if lower == 0:
            assert (wide == exact).all()


@given(st.floats(SCALE_MIN, SCALE_MAX, width=32))
def test_rounding_to_bf16_gives_the_least_one_that_is_not_smaller(value):
    exact = np.float32(value)
    nearest = exact.astype(ml_dtypes.bfloat16)
    above = np.nextafter(nearest, ml_dtypes.bfloat16(np.inf))
    wanted = nearest if np.float32(nearest) >= exact else above
    [rounded] = round_up_to_bf16(np.array([exact]))
    assert np.float32(rounded) == np.float32(wanted)
    assert SCALE_MIN <= float(rounded) <= SCALE_MAX


def test_an_ordinary_cast_would_go_down():
    scales = some_scales("head").k_scale
    assert (scales.astype(ml_dtypes.bfloat16).astype(np.float32) < scales).any()


# Names and recipes.


@pytest.mark.parametrize(
    ("format", "name", "tensor_shape"),
    [
        ("vllm", "model.layers.2.self_attn.attn.v_scale", [1]),
        ("compressed-tensors", "model.layers.2.self_attn.v_scale", [1]),
        ("modelopt", "model.layers.2.self_attn.v_proj.v_scale", []),
    ],
)
@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bf16", "BF16")])
def test_tensors_have_the_names_shapes_and_types_of_the_format(
    tmp_path, format, name, tensor_shape, dtype, stored
):
    export_scales(some_scales(), tmp_path, format=format, dtype=dtype)
    with safetensors.safe_open(tmp_path / SCALES_FILE, framework="numpy") as opened:
        assert len(opened.keys()) == 6
        assert opened.metadata()["format"] == "pt"
        assert opened.get_slice(name).get_shape() == tensor_shape
        assert opened.get_slice(name).get_dtype() == stored


@pytest.mark.parametrize("format", HOLD_HEADS)
def test_scales_per_head_have_an_axis_for_tokens_and_one_for_elements(format):
    tensors = export_tensors(some_scales("head"), format=format)
    assert {values.shape for values in tensors.values()} == {(NUM_KV_HEADS, 1, 1)}


@pytest.mark.parametrize(
    ("granularity", "strategy"), [("tensor", "tensor"), ("head", "attn_head")]
)
@pytest.mark.parametrize("format", HOLD_HEADS)
def test_the_scheme_says_what_the_scales_are(tmp_path, format, granularity, strategy):
    export_scales(some_scales(granularity), tmp_path, format=format)
    recipe = json.loads((tmp_path / "quantization_config.json").read_text())
    assert recipe["quantization_config"]["quant_method"] == "compressed-tensors"
    assert recipe["quantization_config"]["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
    }


def test_the_recipe_of_modelopt_names_the_cache_alone(tmp_path):
    export_scales(some_scales(), tmp_path, format="modelopt")
    recipe = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert recipe["producer"]["name"] == "fp8kv-jax"
    assert recipe["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": "FP8"}


def test_the_old_json_holds_the_larger_of_k_and_v(tmp_path):
    scales = some_scales()
    with pytest.warns(
        UserWarning, match=r"one number for K and V: .* layers 0, 2, 3\."
    ):
        [file] = export_scales(
            scales, tmp_path, format="legacy-json", model_type="llama"
        )
    contents = json.loads(file.read_text())
    assert contents["model_type"] == "llama"
    assert contents["kv_cache"]["dtype"] == "float8_e4m3fn"
    wanted = np.maximum(scales.k_scale, scales.v_scale)
    assert contents["kv_cache"]["scaling_factor"] == {
        "0": {"0": wanted[0, 0], "2": wanted[1, 0], "3": wanted[2, 0]}
    }
    np.testing.assert_array_equal(back(tmp_path).v_scale, wanted)


@pytest.mark.parametrize("format", ["modelopt", "legacy-json"])
def test_a_format_without_heads_refuses_scales_per_head(tmp_path, format):
    with pytest.raises(
        ScaleError,
        match=f"Expected scales per tensor, all that {format} can hold, got 4",
    ):
        export_scales(some_scales("head"), tmp_path, format=format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"format": "gguf"},
            r"format to be one of 'vllm', .*'legacy-json', got 'gguf'",
        ),
        ({"format": "vllm", "dtype": "f16"}, r"dtype 'float32' or 'bf16', got 'f16'"),
    ],
)
def test_an_unknown_format_or_type_is_refused(tmp_path, options, message):
    with pytest.raises(ScaleError, match=message):
        export_scales(some_scales(), tmp_path, **options)


def test_scales_that_are_not_sound_are_refused(tmp_path):
    scales = some_scales()
    scales.k_scale[1] = np.nan
    with pytest.raises(ScaleError, match=r"k_scale to be finite, .* layers 2\."):
        export_scales(scales, tmp_path, format="vllm")
    assert list(tmp_path.iterdir()) == []


# The model's own names.


@pytest.mark.parametrize(
    "stem",
    [
        "model.layers.{}.self_attn.",
        "language_model.model.layers.{}.self_attn.",
        "model.language_model.layers.{}.self_attn.",
        "backbone.layers.{}.mixer.",
    ],
)
def test_exported_names_begin_as_the_models_own_do(tmp_path, stem):
    names = [
        *layer_names(range(NUM_LAYERS), stem),
        *layer_names(range(9), "vision_tower.encoder.layers.{}.self_attn."),
        "lm_head.weight",
    ]
    scales = some_scales()
    export_scales(scales, tmp_path, format="compressed-tensors", names=names)
    tensors = safetensors.numpy.load_file(tmp_path / SCALES_FILE)
    assert set(tensors) == {
        f"{stem.format(layer)}{letter}_scale" for layer in (0, 2, 3) for letter in "kv"
    }
    np.testing.assert_array_equal(back(tmp_path).k_scale, scales.k_scale)


@pytest.mark.parametrize(
    "names",
    [
        layer_names([0]),
        layer_names(range(5), "vision_tower.encoder.layers.{}.self_attn.")
        + layer_names([0]),
        # Layers of another kind, in a hybrid.
        [
            *layer_names([0]),
            *(f"model.layers.{i}.mixer.in_proj.weight" for i in range(5)),
        ],
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_layers_that_the_model_lacks_are_refused(tmp_path, names, format):
    with pytest.raises(
        ScaleError,
        match=r"K projections of layers 2, 3, such as model\.layers\.2\.self_attn\."
        r"k_proj\.weight, got model\.layers\.0\.self_attn",
    ):
        export_scales(some_scales(), tmp_path, format=format, names=names)
    assert list(tmp_path.iterdir()) == []


def test_a_layer_in_two_places_is_refused():
    names = layer_names(range(5)) + layer_names(
        [2], "language_model.layers.{}.self_attn."
    )
    with pytest.raises(
        ScaleError, match=r"one attention in layer 2 .* got language_model\..*, model\."
    ):
        export_tensors(some_scales(), format="vllm", names=names)


def test_a_model_without_tensors_is_refused():
    with pytest.raises(ScaleError, match=r"layers 0, 2, 3, .* got none"):
        export_tensors(some_scales(), format="vllm", names=[])


# Files.


def test_a_file_that_is_there_stays_unless_it_is_the_same(tmp_path):
    scales = some_scales()
    written = export_scales(scales, tmp_path, format="vllm")
    before = {file: file.read_bytes() for file in written}
    assert export_scales(scales, tmp_path, format="vllm") == written
    with pytest.raises(ScaleError, match=f"no other {SCALES_FILE} in .*, found one"):
        export_scales(some_scales(seed=1), tmp_path, format="vllm")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_write_that_fails_leaves_nothing_half_written(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        export_scales(some_scales(), tmp_path, format="vllm")
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_is_written_before_the_scales(tmp_path, monkeypatch):
    seen = []

    def write(path, data):
        seen.append(path.name)

    monkeypatch.setattr(exports, "write_file", write)
    export_scales(some_scales(), tmp_path, format="vllm")
    # A recipe alone loads nowhere; scales alone might, without what they are.
    assert seen == ["quantization_config.json", SCALES_FILE]


def test_an_export_with_a_changed_byte_is_refused(tmp_path):
    export_scales(some_scales(), tmp_path, format="vllm")
    file = tmp_path / SCALES_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        ScaleError, match=rf"{re.escape(SCALES_FILE)} to have the digest .* is damaged"
    ):
        back(tmp_path)
