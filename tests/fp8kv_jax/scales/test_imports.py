"""Importing scales: every spelling, shape and recipe, and what is refused.

Row numbers are those of the table in docs/cases.md.
"""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from exchange_files import (
    NUM_KV_HEADS,
    NUM_LAYERS,
    check_values,
    legacy,
    save,
    save_json,
    scale_of,
    tensors_of,
    value_of,
)

from fp8kv_jax.scales import scale_files
from fp8kv_jax.scales.imports import import_scales, import_tensors
from fp8kv_jax.scales.scale_set import ScaleError
from fp8kv_jax.scales.spellings import looks_like_kv_scale, match_name

DATA = Path(__file__).parent / "data"
MODEL = {"num_layers": NUM_LAYERS, "num_kv_heads": NUM_KV_HEADS}


def read(path, **options):
    return import_scales(path, **(MODEL | options))


@pytest.fixture
def refused(tmp_path):
    """Imports tensors from a file and by name: both must fail with this message."""

    def check(tensors, message, **options):
        with pytest.raises(ScaleError, match=message) as by_file:
            read(save(tmp_path / "x.safetensors", tensors), **options)
        with pytest.raises(ScaleError, match=message) as by_name:
            import_tensors(tensors, **(MODEL | options))
        where = ("x.safetensors", "the tensors")
        assert str(by_file.value).replace(*where) == str(by_name.value)
        assert "\n" not in str(by_file.value)

    return check


# Spellings.


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.{layer}.self_attn.{letter}_scale",
        "model.layers.{layer}.self_attn.attn.{letter}_scale",
        "model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale",
        "model.layers.{layer}.self_attn.{letter}_proj.output_scale",
        "model.layers.{layer}.self_attn.qkv_proj.{letter}_scale",
        "model.layers.{layer}.self_attn.qkqkv_proj.{letter}_scale",
        "backbone.layers.{layer}.mixer.{letter}_proj.{letter}_scale",
        "model.layers.{layer}.self_attn.{letter}_cache.scale",
        "language_model.model.layers.{layer}.self_attn.{letter}_scale",
        "model.language_model.layers.{layer}.self_attn.{letter}_proj.{letter}_scale",
        "layers.{layer}.attention.{letter}_scale",
    ],
)
@pytest.mark.parametrize("shape", [(1,), (NUM_KV_HEADS, 1, 1)])
def test_every_spelling_of_two_scales_loads(tmp_path, pattern, shape):
    path = save(tmp_path / "x.safetensors", tensors_of(pattern, shape=shape))
    scale_set, notes = read(path)
    check_values(scale_set)
    assert scale_set.granularity == ("tensor" if shape == (1,) else "head")
    assert notes == []


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.{layer}.self_attn.kv_scale",
        "transformer.layers.{layer}.attention.kv_cache_scaling_factor",
    ],
)
def test_row_37_one_scale_for_both_is_used_for_both_with_a_note(tmp_path, pattern):
    path = save(tmp_path / "x.safetensors", tensors_of(pattern, letters="k"))
    scale_set, notes = read(path)
    check_values(scale_set, letters="kk")
    assert len(notes) == 1
    assert re.search(r"is used for K and for V in 3 layers", notes[0])


def test_an_inverse_is_made_once_in_float32(tmp_path):
    scale_set, _ = read(save(tmp_path / "x.safetensors", tensors_of()))
    np.testing.assert_array_equal(
        scale_set.k_inv_scale, np.float32(1) / scale_set.k_scale
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.weight_scale_2",
        "model.layers.0.self_attn.v_proj.input_scale",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.kv_b_proj.weight_scale_inv",
        "model.layers.0.mlp.down_proj.output_scale",
        "model.layers.0.self_attn.o_proj.output_scale",
        "lm_head.weight",
    ],
)
def test_weights_and_their_scales_are_no_kv_scales(name):
    assert match_name(name) is None
    assert not looks_like_kv_scale(name)


def test_weights_are_not_read(tmp_path, monkeypatch):
    weights = {"model.layers.0.self_attn.k_proj.weight": np.zeros((64, 64), np.float32)}
    path = save(tmp_path / "x.safetensors", tensors_of() | weights)
    got = []

    class Spy:
        def __init__(self, *arguments, **options):
            self.opened = safetensors.safe_open(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def __getattr__(self, name):
            return getattr(self.opened, name)

        def get_tensor(self, name):
            got.append(name)
            return self.opened.get_tensor(name)

    fake = type("", (), {"safe_open": Spy, "SafetensorError": ValueError})
    monkeypatch.setattr(scale_files, "safetensors", fake)
    read(path)
    assert sorted(got) == sorted(tensors_of())


def test_zero_points_that_are_0_are_ignored_with_a_note(tmp_path):
    zero = "model.layers.{}.self_attn.{}_zero_point"
    zeros = {
        # compressed-tensors keeps them in FP8.
        zero.format(0, "k"): np.zeros(1, ml_dtypes.float8_e4m3fn),
        zero.format(0, "v"): np.array([-0.0], ml_dtypes.float8_e4m3fn),
        zero.format(1, "k"): np.zeros((4, 1, 1), ml_dtypes.bfloat16),
        "model.layers.1.self_attn.v_proj.output_zero_point": np.zeros((), np.int8),
    }
    scale_set, notes = read(save(tmp_path / "x.safetensors", tensors_of() | zeros))
    check_values(scale_set)
    assert notes == ["4 zero points are ignored: all of them are 0."]


@pytest.mark.parametrize(
    "zero", [np.float32([3]), np.array([-128], np.int8), np.array([128], np.uint8)]
)
def test_a_zero_point_that_is_not_0_is_refused(tmp_path, zero):
    tensors = tensors_of() | {"model.layers.2.self_attn.k_zero_point": zero}
    with pytest.raises(
        ScaleError, match=r"zero point .*2.self_attn.k_zero_point to be"
    ):
        read(save(tmp_path / "x.safetensors", tensors))


def test_scales_of_queries_are_ignored_with_a_note(tmp_path):
    query = {"model.layers.0.self_attn.q_scale": np.float32([0.5])}
    _, notes = read(save(tmp_path / "x.safetensors", tensors_of() | query))
    assert notes == [
        "1 scales of queries or probabilities are ignored: no cache holds these."
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        # Layers of another tower, an unknown wrapper, unknown tails.
        "vision_tower.encoder.layers.{layer}.self_attn.{letter}_scale",
        "model.layers.{layer}.wrapped.self_attn.{letter}_scale",
        "mtp.layers.{layer}.self_attn.{letter}_scale",
        "model.layers.{layer}.self_attn.{letter}_scale_inv",
        "model.layers.{layer}.self_attn.mla_attn.{letter}_scale",
        "model.layers.{layer}.self_attn.{letter}_global_scale",
        "model.layers.0{layer}.self_attn.{letter}_scale",
        "{letter}_scale.{layer}.key_cache.scale",
    ],
)
def test_row_33_names_that_fit_no_layer_are_an_error_that_lists_them(refused, pattern):
    tensors = tensors_of(pattern)
    first = re.escape(min(tensors))
    refused(
        tensors,
        rf"Expected names .*model\.layers\.N\.self_attn\. .*k\|v.*; found 6 in "
        rf".* look like scales of a KV cache and fit none: {first}, ",
    )
    # Also beside names that fit.
    refused(tensors | tensors_of(), "found 6 in .* fit none")


def test_row_33_scales_of_a_deeper_model_are_an_error_that_names_the_layers(refused):
    refused(
        tensors_of(layers=range(32)),
        r"Expected scales for layers 0 to 2, those of the model, got some for layers "
        r"3, 4, 5",
    )


def test_a_file_without_scales_is_an_error(refused):
    refused(
        {"model.layers.0.mlp.up_proj.weight": np.zeros(4, np.float32)},
        "Expected scales of a KV cache in .*, found none among 1 names",
    )


# Values.


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_row_39_a_bad_number_is_the_same_error_by_file_and_by_name(refused, value):
    name = "model.layers.1.self_attn.v_scale"
    refused(
        tensors_of() | {name: np.float32([value])},
        r"Expected v_scale to be finite, positive .* got \S+ and the like in layers 1\.",
    )


@pytest.mark.parametrize("value", [0, -1, np.nan, np.inf, "0.5", None, True, 10**400])
def test_row_39_a_bad_number_is_the_same_error_by_json_and_by_name(tmp_path, value):
    name = "transformer.layers.{}.attention.kv_cache_scaling_factor"
    tensors = {name.format(0): 0.5, name.format(1): value}
    with pytest.raises(ScaleError) as by_name:
        import_tensors(tensors, **MODEL)
    contents = legacy({"0": {"0": 0.5, "1": value}})
    with pytest.raises(ScaleError) as by_file:
        read(save_json(tmp_path / "x.json", contents))
    shown = str(by_file.value).replace("scaling_factor 0.1", name.format(1))
    assert shown == str(by_name.value)
    assert "finite" in shown or "floating point" in shown
    assert name.format(1) in shown or "in layers 1." in shown


def test_row_34_scales_that_are_all_zero_are_an_error_that_lists_the_layers(refused):
    zeros = {name: np.zeros(1, np.float32) for name in tensors_of()}
    refused(zeros, r"Expected k_scale to be finite, positive .* in layers 0, 1, 2\.")


@pytest.mark.parametrize("shape", [(1,), (NUM_KV_HEADS,)])
def test_row_35_scales_that_are_all_one_load_with_a_warning(tmp_path, shape):
    ones = {name: np.ones(shape, np.float32) for name in tensors_of()}
    path = save(tmp_path / "x.safetensors", ones)
    with pytest.warns(UserWarning, match=r"Every scale is exactly 1\.0"):
        scale_set, notes = read(path)
    assert (scale_set.k_scale == 1).all()
    assert notes[0].startswith("Every scale is exactly 1.0")
    # One that differs is enough.
    ones["model.layers.2.self_attn.v_scale"] = np.full(shape, 0.5, np.float32)
    assert read(save(path, ones))[1] == []


def test_row_36_scales_of_some_layers_load_and_the_others_are_named(tmp_path):
    path = save(tmp_path / "x.safetensors", tensors_of(layers=(3, 7, 11)))
    scale_set, notes = read(path, num_layers=13)
    check_values(scale_set, layers=(3, 7, 11))
    assert notes == ["There are no scales for layers 0, 1, 2, 4, 5, 6, 8, 9, 10, 12."]


@pytest.mark.parametrize(("kept", "lost"), [("k", "v"), ("v", "k")])
def test_a_scale_without_its_partner_is_an_error(refused, kept, lost):
    tensors = tensors_of(layers=[0]) | tensors_of(layers=(1, 2), letters=kept)
    refused(
        tensors,
        f"Expected a scale for {lost.upper()} beside each for {kept.upper()}, missing "
        r"in layers 1, 2\.",
    )


@pytest.mark.parametrize(
    ("shape", "granularity"),
    [
        ((), "tensor"),
        ((1,), "tensor"),
        ((1, 1, 1), "tensor"),
        ((NUM_KV_HEADS,), "head"),
        ((NUM_KV_HEADS, 1, 1), "head"),
    ],
)
@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64]
)
def test_row_38_shapes_and_types_load_alike(tmp_path, shape, granularity, dtype):
    tensors = tensors_of(shape=shape, dtype=dtype)
    for scale_set, notes in (
        read(save(tmp_path / "x.safetensors", tensors)),
        import_tensors(tensors, **MODEL),
    ):
        check_values(scale_set)
        assert scale_set.granularity == granularity
        assert notes == []


def test_row_38_python_floats_load_by_name():
    name = "model.layers.{}.self_attn.{}_scale"
    tensors = {
        name.format(i, x): value_of(i, x) for i in range(NUM_LAYERS) for x in "kv"
    }
    check_values(import_tensors(tensors, **MODEL)[0])


@pytest.mark.parametrize("shape", [(2,), (1, NUM_KV_HEADS), (0,), (NUM_KV_HEADS, 4)])
def test_row_38_another_shape_is_an_error(refused, shape):
    refused(
        tensors_of() | {"model.layers.1.self_attn.k_scale": np.ones(shape, np.float32)},
        r"Expected .*1.self_attn.k_scale.* to be of shape .* \(4, 1, 1\), .* got "
        + re.escape(str(shape)),
    )


def test_a_large_tensor_of_that_name_is_refused_unread(tmp_path, monkeypatch):
    # The first in order, so that nothing else is read before it.
    large = {"model.layers.0.self_attn.k_scale": np.ones((512, 512), np.float32)}
    path = save(tmp_path / "x.safetensors", tensors_of() | large)
    monkeypatch.setattr(scale_files, "as_float32", pytest.fail)
    with pytest.raises(ScaleError, match=r"got \(512, 512\)"):
        read(path)


def test_shapes_per_tensor_and_per_head_do_not_mix(refused):
    refused(
        tensors_of(layers=(0, 2)) | tensors_of(layers=[1], shape=(NUM_KV_HEADS,)),
        r"Expected all scales .* per tensor in layers 0, 2, per head in layers 1\.",
    )


def test_lists_of_several_lengths_are_no_scales():
    tensors = tensors_of() | {"model.layers.1.self_attn.k_scale": [[1.0], [1.0, 2.0]]}
    with pytest.raises(ScaleError, match=r"1.self_attn.k_scale to be floating point"):
        import_tensors(tensors, **MODEL)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_integers_are_no_scales(tmp_path, dtype):
    tensors = tensors_of() | {"model.layers.1.self_attn.k_scale": np.ones(1, dtype)}
    with pytest.raises(ScaleError, match=r"1.self_attn.k_scale to be of type F16, "):
        read(save(tmp_path / "x.safetensors", tensors))
    with pytest.raises(ScaleError, match=r"1.self_attn.k_scale to be floating point"):
        import_tensors(tensors, **MODEL)


def test_two_spellings_that_disagree_are_an_error(refused):
    other = {"model.layers.1.self_attn.attn.v_scale": np.float32([0.25])}
    refused(
        tensors_of() | other,
        r"Expected .*self_attn\S* and .*self_attn\S* to be equal, since both are the "
        r"v_scale of layer 1, got ",
    )
    single = {"model.layers.1.self_attn.kv_scale": scale_of(1, "k")}
    refused(tensors_of() | single, "v_scale of layer 1")


def test_two_spellings_that_agree_load_with_a_note(tmp_path):
    twice = tensors_of() | tensors_of(
        "model.layers.{layer}.self_attn.attn.{letter}_scale"
    )
    scale_set, notes = read(save(tmp_path / "x.safetensors", twice))
    check_values(scale_set)
    assert notes == ["6 scales stand there twice, with equal values."]


def test_fnuz_scales_are_doubled_when_asked(tmp_path):
    path = save(tmp_path / "x.safetensors", tensors_of())
    scale_set, notes = read(path, fnuz=True)
    check_values(scale_set, factor=2.0)
    assert notes == ["Scales are doubled, from float8_e4m3fnuz to float8_e4m3fn."]
