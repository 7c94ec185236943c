"""Hugging Face directories: shards, older spellings, and every error."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models.loading import ModelFileError, load_model


@pytest.fixture
def copy(data, tmp_path):
    """Copies a tiny model, so that a test may damage it."""

    def make(name):
        return shutil.copytree(data / f"tiny_{name}", tmp_path / name)

    return make


def edit_json(path, **changes):
    values = json.loads(path.read_text())
    values.update(changes)
    kept = {key: value for key, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept))


def edit_tensors(path, edit):
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    edit(tensors)
    safetensors.numpy.save_file(tensors, file)


def shard(path):
    """Splits model.safetensors in two and writes the index."""
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, members in enumerate((names[:7], names[7:])):
        file = f"model-{part}.safetensors"
        members = {name: tensors[name] for name in members}
        safetensors.numpy.save_file(members, path / file)
        weight_map |= dict.fromkeys(members, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


IDS = np.arange(24)[None]


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_are_the_same_model(with_index, copy, tiny_models, logits_of):
    path = copy("llama")
    index = shard(path)
    if not with_index:
        index.unlink()
    loaded = load_model(path, jnp.float32)
    np.testing.assert_array_equal(
        logits_of(loaded, IDS), logits_of(tiny_models["llama"], IDS)
    )


def test_older_spellings_of_the_rope_mean_the_same(copy, tiny_models):
    llama, gemma = copy("llama"), copy("gemma3")
    parameters = json.loads((llama / "config.json").read_text())["rope_parameters"]
    theta = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    edit_json(
        llama / "config.json",
        rope_parameters=...,
        rope_theta=theta,
        rope_scaling=parameters,
    )
    edit_json(
        gemma / "config.json",
        rope_parameters=...,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    for path, name in ((llama, "llama"), (gemma, "gemma3")):
        assert load_model(path, jnp.float32).config == tiny_models[name].config


def test_gemma_layers_follow_the_pattern_when_none_are_listed(copy):
    path = copy("gemma3")
    edit_json(path / "config.json", layer_types=..., sliding_window_pattern=2)
    config = load_model(path, jnp.float32).config
    assert config.sliding_windows == (5, None, 5)


def test_qwen2_slides_only_where_asked(copy):
    path = copy("qwen2")
    edit_json(
        path / "config.json",
        layer_types=...,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    )
    assert load_model(path, jnp.float32).config.sliding_windows == (None, 9)


def test_end_tokens_come_from_all_three_files(copy):
    path = copy("qwen3")
    edit_json(path / "generation_config.json", eos_token_id=[2, 5])
    edit_json(path / "tokenizer_config.json", eos_token={"content": "<|user|>"})
    assert load_model(path, jnp.float32).config.eos_ids == (2, 3, 5)


def test_a_chat_template_may_stand_in_the_tokenizer_config(copy):
    path = copy("qwen3")
    (path / "chat_template.jinja").unlink()
    several = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    edit_json(path / "tokenizer_config.json", chat_template=several)
    tokenizer = load_model(path, jnp.float32).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x"


def test_harmless_extra_tensors_are_passed_over(copy, tiny_models, logits_of):
    path = copy("qwen2")

    def add(tensors):
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[name] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied

    edit_tensors(path, add)
    loaded = load_model(path, jnp.float32)
    np.testing.assert_array_equal(
        logits_of(loaded, IDS), logits_of(tiny_models["qwen2"], IDS)
    )


def failure(path):
    with pytest.raises(ModelFileError) as caught:
        load_model(path, jnp.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "llama: no config.json"),
        ("tokenizer.json", r"llama: no tokenizer \(no tokenizer.json\)"),
        ("model.safetensors", r"llama: no \*.safetensors file"),
    ],
)
def test_missing_files_are_named(file, message, copy):
    path = copy("llama")
    (path / file).unlink()
    with pytest.raises(ModelFileError, match=message):
        load_model(path, jnp.float32)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_bad_json_is_named(file, copy):
    path = copy("llama")
    text = (path / file).read_text()
    (path / file).write_text(text[: len(text) // 2])
    assert f"llama: {file} is not valid JSON" in failure(path)
    (path / file).write_text("[1]")
    assert "object" in failure(path)


def test_a_tokenizer_the_library_refuses_is_named(copy):
    path = copy("llama")
    edit_json(path / "tokenizer.json", model={"type": "Nonsense"})
    assert "tokenizer.json cannot be used" in failure(path)


def test_a_tokenizer_of_an_unknown_kind_is_named(copy):
    path = copy("llama")
    edit_json(path / "tokenizer.json", decoder={"type": "Fuse"})
    assert "tokenizer.json decodes by ['Fuse']; known are ByteLevel" in failure(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "unknown architecture 'mamba' in config.json; known"),
        ({"hidden_size": ...}, "hidden_size in config.json should be a number"),
        ({"hidden_size": "big"}, "should be a number, found 'big'"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"attention_bias": True}, "attention_bias in config.json is set"),
        ({"hidden_act": "relu"}, "unknown activation 'relu'"),
        ({"quantization_config": {}}, "has a quantization_config"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "rope scaling 'yarn' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}},
            "rope scaling 'linear' lacks 'factor'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not supported",
        ),
        ({"vocab_size": 100}, "expected (100, 32)"),
    ],
)
def test_an_unusable_config_is_explained(changes, message, copy):
    path = copy("llama")
    edit_json(path / "config.json", **changes)
    assert message in failure(path)


def test_unknown_layer_types_are_named(copy):
    path = copy("gemma3")
    edit_json(path / "config.json", layer_types=["chunked_attention"] * 3)
    assert "unknown layer_types in config.json: ['chunked_attention']" in failure(path)


def test_bidirectional_gemmas_are_refused(copy):
    path = copy("gemma3")
    edit_json(path / "config.json", use_bidirectional_attention=True)
    assert "use_bidirectional_attention is not supported" in failure(path)


def test_missing_extra_and_misshapen_tensors_are_named(copy):
    path = copy("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    assert f"1 tensors are missing: {name}" in failure(path)
    edit_tensors(
        path, lambda tensors: tensors.update({name: np.zeros((3, 32), np.float32)})
    )
    assert f"{name} is (3, 32), expected (48, 32)" in failure(path)
    edit_tensors(path, lambda tensors: tensors.update(x=np.zeros(1, np.float32)))
    assert "no place in the model that its metadata describes: x" in failure(path)


def test_quantized_tensors_are_refused(copy):
    path = copy("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(
        path, lambda tensors: tensors.update({name: np.zeros((48, 32), np.int8)})
    )
    assert f"tensor {name} is int8, expected one of float32" in failure(path)


def test_a_cut_weight_file_is_named(copy):
    path = copy("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "model.safetensors: not a whole safetensors file" in failure(path)


def test_an_index_that_promises_too_much_is_explained(copy):
    path = copy("llama")
    index = shard(path)
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"x": "model-0.safetensors"})
    assert "model-0.safetensors lacks tensors" in failure(path)
    edit_json(index, weight_map=weight_map | {"x": "model-9.safetensors"})
    assert "are missing: model-9.safetensors" in failure(path)
    edit_json(index, weight_map=[])
    assert "has no weight_map" in failure(path)


def test_a_tensor_in_two_files_is_named(copy):
    path = copy("llama")
    shutil.copy(path / "model.safetensors", path / "again.safetensors")
    assert "is in again.safetensors and in model.safetensors" in failure(path)


def test_a_tokenizer_larger_than_the_embedding_is_refused(copy):
    path = copy("qwen2")
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    for index in range(121, 140):
        added.append({**added[0], "id": index, "content": f"<extra{index}>"})
    edit_json(path / "tokenizer.json", added_tokens=added)
    assert "the tokenizer has 140 tokens, the embedding 128 rows" in failure(path)
