"""Importing from whole checkpoints: shards, recipes, the old JSON, damaged files.

Row numbers are those of the table in docs/cases.md.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from exchange_files import (
    NUM_KV_HEADS,
    NUM_LAYERS,
    SCHEME,
    check_values,
    legacy,
    save,
    save_json,
    tensors_of,
    value_of,
)

from fp8kv_jax.scales.imports import import_scales, source_files
from fp8kv_jax.scales.scale_set import ScaleError

DATA = Path(__file__).parent / "data"
MODEL = {"num_layers": NUM_LAYERS, "num_kv_heads": NUM_KV_HEADS}
INDEX = "model.safetensors.index.json"


def read(path, **options):
    return import_scales(path, **(MODEL | options))


# Shards.


def save_shards(folder):
    places = {}
    for layer in range(NUM_LAYERS):
        name = f"model-{layer}.safetensors"
        save(folder / name, tensors_of(layers=[layer]))
        places |= dict.fromkeys(tensors_of(layers=[layer]), name)
    return places


def test_shards_load_as_one_with_and_without_an_index(tmp_path):
    places = save_shards(tmp_path)
    check_values(read(tmp_path)[0])
    save_json(tmp_path / INDEX, {"weight_map": places})
    check_values(read(tmp_path)[0])


@pytest.mark.parametrize("lost", ["file", "tensor"])
def test_scales_that_the_index_promises_have_to_be_there(tmp_path, lost):
    save_json(tmp_path / INDEX, {"weight_map": save_shards(tmp_path)})
    if lost == "file":
        (tmp_path / "model-1.safetensors").unlink()
    else:
        save(tmp_path / "model-1.safetensors", {"x": np.zeros(1)})
    with pytest.raises(
        ScaleError,
        match=rf"{INDEX} promises, missing: .*1.self_attn.k_scale in model-1.safeten",
    ):
        read(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path, index):
    save_shards(tmp_path)
    save_json(tmp_path / INDEX, index)
    with pytest.raises(ScaleError, match=re.escape(INDEX)):
        read(tmp_path)


def test_row_41_files_of_ranks_that_agree_load(tmp_path):
    pattern = "transformer.layers.{layer}.attention.kv_cache_scaling_factor"
    for rank in range(2):
        save(tmp_path / f"rank{rank}.safetensors", tensors_of(pattern, letters="k"))
    check_values(read(tmp_path)[0], letters="kk")


def test_row_41_files_of_ranks_that_disagree_are_refused(tmp_path):
    save(tmp_path / "rank0.safetensors", tensors_of())
    other = {"model.layers.1.self_attn.k_scale": np.float32([0.125])}
    save(tmp_path / "rank1.safetensors", tensors_of() | other)
    with pytest.raises(
        ScaleError,
        match=r"k_scale in rank0.safetensors and .* in rank1.safetensors to be equal, "
        r"since both are the k_scale of layer 1",
    ):
        read(tmp_path)


def test_row_41_files_with_the_heads_of_one_rank_are_refused(tmp_path):
    half = tensors_of(shape=(NUM_KV_HEADS // 2,))
    for rank in range(2):
        save(tmp_path / f"rank{rank}.safetensors", half)
    with pytest.raises(
        ScaleError, match=r"one for each of the model's 4 KV heads, got"
    ):
        read(tmp_path)


@pytest.mark.parametrize("name", ["", "x.safetensors", "x.json"])
def test_what_is_not_there_is_an_error(tmp_path, name):
    with pytest.raises(ScaleError, match=r"no such file|found neither"):
        read(tmp_path / name)


# Recipes.


def in_config(scheme):
    return {"quantization_config": {"kv_cache_scheme": scheme}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic": True}, "Expected dynamic=False .* got True"),
        ({"type": "int"}, "Expected type='float' .* got 'int'"),
        ({"type": None}, "Expected type='float' .* got None"),
        ({"num_bits": 4}, "Expected num_bits=8 .* got 4"),
        ({"num_bits": True}, "Expected num_bits=8 .* got True"),
        ({"symmetric": False}, "Expected symmetric=True .* got False"),
        ({"strategy": "channel"}, "Expected strategy 'tensor' or 'attn_head' .* 'cha"),
        ({"strategy": ["tensor"]}, r"Expected strategy .* got \['tensor'\]"),
        ({"strategy": "attn_head"}, "Expected scales per head, .* got scales per ten"),
    ],
)
@pytest.mark.parametrize("where", ["folder", "file"])
def test_a_scheme_of_another_cache_is_refused(tmp_path, change, message, where):
    file = save(tmp_path / "model.safetensors", tensors_of())
    save_json(tmp_path / "config.json", in_config(SCHEME | change))
    with pytest.raises(ScaleError, match=message):
        read(tmp_path if where == "folder" else file)


def test_a_scheme_without_a_type_means_integers(tmp_path):
    save(tmp_path / "model.safetensors", tensors_of())
    scheme = {key: value for key, value in SCHEME.items() if key != "type"}
    save_json(tmp_path / "config.json", in_config(scheme))
    with pytest.raises(ScaleError, match="got none, which means 'int'"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("config.json", in_config(SCHEME)),
        ("config.json", {"text_config": in_config(SCHEME)}),
        ("config.json", in_config({"num_bits": 8, "type": "float"})),
        ("config.json", in_config(None)),
        ("config.json", {"quantization_config": None, "model_type": "llama"}),
        ("config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": "FP8"}}),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": None}}),
    ],
)
def test_a_recipe_of_ours_or_of_none_is_accepted(tmp_path, name, contents):
    save(tmp_path / "model.safetensors", tensors_of())
    save_json(tmp_path / name, contents)
    check_values(read(tmp_path)[0])


@pytest.mark.parametrize("algorithm", ["INT8", "NVFP4", "NVFP4_AFFINE"])
@pytest.mark.parametrize("name", ["hf_quant_config.json", "config.json"])
def test_another_format_of_modelopt_is_refused(tmp_path, algorithm, name):
    save(tmp_path / "model.safetensors", tensors_of())
    recipe = {"quantization": {"kv_cache_quant_algo": algorithm}}
    save_json(tmp_path / name, recipe)
    with pytest.raises(
        ScaleError, match=f"kv_cache_quant_algo 'FP8' in {name}, got '{algorithm}'"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("outputs", "good"),
    [
        ({"dtype": "fp8_e4m3", "is_dynamic": False}, True),
        ({"dtype": "fp8_e4m3", "is_dynamic": True}, False),
        ({"dtype": "fp8_e5m2", "is_dynamic": False}, False),
        ({"dtype": "int8", "is_dynamic": False}, False),
    ],
)
def test_the_recipe_of_quark_is_checked(tmp_path, outputs, good):
    pattern = "model.layers.{layer}.self_attn.{letter}_proj.output_scale"
    save(tmp_path / "model.safetensors", tensors_of(pattern))
    layers = {"*k_proj": {"output_tensors": outputs}, "*up_proj": {"weight": {}}}
    recipe = {"quant_method": "quark", "layer_quant_config": layers}
    save_json(tmp_path / "config.json", {"quantization_config": recipe})
    if good:
        check_values(read(tmp_path)[0])
    else:
        with pytest.raises(ScaleError, match=r"static output_tensors .* \*k_proj"):
            read(tmp_path)


@pytest.mark.parametrize(
    "contents",
    [
        {"quantization_config": "fp8"},
        in_config("fp8"),
        "[]",
        "{",
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "\x00",
    ],
)
def test_a_recipe_that_can_not_be_read_is_refused(tmp_path, contents):
    save(tmp_path / "model.safetensors", tensors_of())
    save_json(tmp_path / "config.json", contents)
    with pytest.raises(ScaleError, match=r"config\.json") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_with_one_kv_head_the_recipe_decides_the_granularity(tmp_path):
    save(tmp_path / "model.safetensors", tensors_of(shape=(1, 1, 1)))
    assert read(tmp_path, num_kv_heads=1)[0].granularity == "tensor"
    scheme = SCHEME | {"strategy": "attn_head"}
    save_json(tmp_path / "config.json", in_config(scheme))
    assert read(tmp_path, num_kv_heads=1)[0].granularity == "head"


# The old JSON.


def layers_of(letter="k"):
    return {str(layer): value_of(layer, letter) for layer in range(NUM_LAYERS)}


def test_the_old_json_loads_for_k_and_v(tmp_path):
    path = save_json(tmp_path / "kv_cache_scales.json", legacy({"0": layers_of()}))
    for source in (path, tmp_path):
        scale_set, notes = read(source, model_type="llama")
        check_values(scale_set, letters="kk")
        assert len(notes) == 1
        assert "is used for K and for V in 3 layers" in notes[0]


def test_row_41_ranks_that_agree_load(tmp_path):
    ranks = {"0": layers_of(), "1": dict(reversed(layers_of().items()))}
    scale_set, notes = read(save_json(tmp_path / "x.json", legacy(ranks)))
    check_values(scale_set, letters="kk")
    assert notes[0] == "All 2 ranks have the same scales."


@pytest.mark.parametrize("change", ["value", "missing"])
def test_row_41_ranks_that_disagree_are_refused(tmp_path, change):
    other = layers_of() | {"1": 0.5}
    if change == "missing":
        del other["1"]
    path = save_json(tmp_path / "x.json", legacy({"0": layers_of(), "1": other}))
    with pytest.raises(
        ScaleError, match=r"ranks 0 and 1 .* differ in layers 1: .* KV heads"
    ):
        read(path)


def test_the_old_json_of_another_model_is_refused(tmp_path):
    path = save_json(tmp_path / "x.json", legacy({"0": layers_of()}))
    with pytest.raises(ScaleError, match=r"model_type 'qwen2' in x\.json, got 'llama'"):
        read(path, model_type="qwen2")


def test_the_old_json_for_fnuz_has_to_be_asked_for(tmp_path):
    contents = legacy({"0": layers_of()}, dtype="float8_e4m3fnuz")
    path = save_json(tmp_path / "x.json", contents)
    with pytest.raises(ScaleError, match="Expected fnuz to be asked for"):
        read(path)
    check_values(read(path, fnuz=True)[0], letters="kk", factor=2.0)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, "kv_cache.scaling_factor in x.json"),
        ({"kv_cache": []}, "kv_cache.scaling_factor in x.json"),
        (legacy({}), "kv_cache.scaling_factor in x.json"),
        (legacy({"0": layers_of()}, dtype="int8"), "kv_cache.dtype .* got 'int8'"),
        (legacy({"0": layers_of()}, dtype=None), "kv_cache.dtype .* got None"),
        (legacy({"0": [0.5]}), r"scaling_factor 0 to map layers to numbers, got \[0.5"),
        (legacy({"0": {}}), "scaling_factor 0 to map layers"),
        (legacy({"0": {"-1": 0.5}}), "numbers from 0 on, got '-1'"),
        (legacy({"0": {"01": 0.5}}), "numbers from 0 on, got '01'"),
        (legacy({"0": {"²": 0.5}}), "numbers from 0 on, got '²'"),
        (legacy({"0": {"9" * 5000: 0.5}}), "numbers from 0 on, got '999"),
        (legacy({"0": {"7": 0.5}}), "got some for layers 7"),
        (
            legacy({"0": {"0": [0.5, 0.5]}}),
            r"scaling_factor 0\.0 to be a number, got \[0\.5, ",
        ),
        (legacy({"0": {"0": {}}}), r"scaling_factor 0\.0 to be a number, got {}"),
        ('{"kv_cache": {"a": 1, "a": 1}}', "'a' stands there twice"),
        ("\x80", "x.json to be valid JSON"),
        ("[]", "x.json to hold a JSON object"),
    ],
)
def test_row_40_a_json_of_another_form_is_refused(tmp_path, contents, message):
    path = save_json(tmp_path / "x.json", contents)
    with pytest.raises(ScaleError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_row_40_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ScaleError, match=r"x\.json to be valid JSON"):
        read(tmp_path / "x.json")


def test_row_40_a_cut_file_is_refused(tmp_path):
    whole = save(tmp_path / "x.safetensors", tensors_of()).read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        (tmp_path / "x.safetensors").write_bytes(whole[:length])
        with pytest.raises(
            ScaleError, match=r"x\.safetensors to be a whole safetensors file"
        ):
            read(tmp_path / "x.safetensors")


# Somebody else's files.


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_checkpoint_of_compressed_tensors_loads(granularity):
    folder = DATA / f"compressed_tensors_{granularity}"
    scale_set, notes = import_scales(folder, num_layers=3, num_kv_heads=2)
    assert scale_set.granularity == granularity
    assert notes == []
    for row, amax in enumerate(
        json.loads((folder / "expected.json").read_text())["amax"]
    ):
        for letter in "kv":
            wanted = np.array(amax[letter]) / 448
            if granularity == "tensor":
                wanted = wanted.max(keepdims=True)
            got = getattr(scale_set, f"{letter}_scale")[row]
            # The package divides in BF16: one rounding, at most 2^-8 of it.
            np.testing.assert_allclose(got, wanted, rtol=2**-8)


def test_sources_are_the_files_that_are_read(tmp_path):
    save(tmp_path / "a.safetensors", tensors_of())
    save_json(tmp_path / "config.json", {})
    save_json(tmp_path / "tokenizer.json", {})
    names = [file.name for file in source_files(tmp_path)]
    assert names == ["a.safetensors", "config.json"]
