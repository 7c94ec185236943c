"""GGUF files: the same model as the Hugging Face directory, and every error."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models.loading import ModelFileError, load_model
from models.loading.gguf_config import config_from_metadata
from models.transformer import random_model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_is_the_same_model_as_its_directory(
    name, gguf_of, tiny_models, logits_of, tmp_path
):
    original = tiny_models[name]
    loaded = load_model(gguf_of(name).write(tmp_path / "m.gguf"), jnp.float32)
    # A GGUF has no query_pre_attn_scalar; the head size stands for it.
    config = dataclasses.replace(
        original.config, softmax_scale=original.config.head_dim**-0.5
    )
    graphdef, _ = random_model(config, seed=0, dtype=jnp.float32)
    original = dataclasses.replace(original, graphdef=graphdef)
    token_ids = np.random.default_rng(2).integers(128, size=(1, 24))
    # Equal weights but, after the divisors of rope_freqs, frequencies that may differ
    # in their last bit: 24 * 2^-24 radians, in logits of up to 20.
    np.testing.assert_allclose(
        logits_of(loaded, token_ids), logits_of(original, token_ids), atol=5e-5
    )


def test_rows_in_another_order_would_show(gguf_of, tiny_models, logits_of, tmp_path):
    contents = gguf_of("llama")
    right = load_model(contents.write(tmp_path / "right.gguf"), jnp.float32)
    kernel = tiny_models["llama"].params["layers"][0]["attention"]["q"]["kernel"]
    contents.tensors["blk.0.attn_q.weight"] = np.array(kernel).T.copy()  # half-split
    wrong = load_model(contents.write(tmp_path / "wrong.gguf"), jnp.float32)
    ids = np.arange(24)[None]
    assert np.max(np.abs(logits_of(right, ids) - logits_of(wrong, ids))) > 0.1


def test_the_tokenizer_comes_from_the_metadata(gguf_of, tiny_models, tmp_path):
    loaded = load_model(gguf_of("llama").write(tmp_path / "m.gguf"), jnp.float32)
    text = "<|user|>the band<|end|>"
    original = tiny_models["llama"].tokenizer
    assert loaded.tokenizer.encode(text) == original.encode(text)
    assert loaded.tokenizer.eos_ids == {2}
    assert (loaded.config.bos_id, loaded.config.eos_ids) == (1, (2,))
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.apply_chat_template(
        messages
    ) == original.apply_chat_template(messages)


def test_norm_scales_stay_float32_in_a_bfloat16_model(gguf_of, tmp_path):
    model = load_model(gguf_of("qwen2").write(tmp_path / "m.gguf"), jnp.bfloat16)
    layer = model.params["layers"][0]
    assert layer["attention"]["q"]["kernel"].dtype == jnp.bfloat16
    assert layer["attention"]["q"]["bias"].dtype == jnp.bfloat16
    assert layer["mlp_norm"]["scale"].dtype == jnp.float32


def failure(path):
    with pytest.raises(ModelFileError) as caught:
        load_model(path, jnp.float32)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_a_missing_file_is_named(tmp_path):
    assert "no such file or directory" in failure(tmp_path / "absent.gguf")


@pytest.mark.parametrize("start", [b"", b"GG", b"PK\x03\x04 and more"])
def test_another_kind_of_file_is_refused(start, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(start)
    assert "not a GGUF file" in failure(path)


def test_a_file_cut_anywhere_is_refused(gguf_of, tmp_path):
    whole = gguf_of("qwen2").write(tmp_path / "whole.gguf").read_bytes()
    cuts = np.random.default_rng(3).integers(4, len(whole) - 32, size=40)
    path = tmp_path / "cut.gguf"
    for cut in [5, 8, 24, len(whole) // 2, *cuts.tolist()]:
        path.write_bytes(whole[:cut])
        assert "cut off or damaged" in failure(path)


def test_a_damaged_length_does_not_hang_the_reader(gguf_of, tmp_path):
    path = gguf_of("qwen2").write(tmp_path / "m.gguf")
    damaged = bytearray(path.read_bytes())
    at = damaged.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type")
    damaged[at + 8 : at + 16] = (2**60).to_bytes(8, "little")
    path.write_bytes(damaged)
    assert "cut off or damaged" in failure(path)


def test_an_unknown_architecture_is_named_with_the_known_ones(gguf_of, tmp_path):
    contents = gguf_of("qwen2")
    contents.architecture = "mamba"
    message = failure(contents.write(tmp_path / "m.gguf"))
    assert "unknown architecture 'mamba'" in message
    assert "llama, qwen2, qwen3, gemma2, gemma3" in message


def test_missing_tensors_are_named(gguf_of, tmp_path):
    contents = gguf_of("qwen2")
    del contents.tensors["blk.1.attn_k.bias"]
    message = failure(contents.write(tmp_path / "m.gguf"))
    assert "1 tensors are missing: blk.1.attn_k.bias" in message


def test_extra_tensors_are_named(gguf_of, tmp_path):
    contents = gguf_of("qwen2")
    contents.tensors["blk.1.attn_sinks"] = np.zeros(4, np.float32)
    message = failure(contents.write(tmp_path / "m.gguf"))
    assert "no place in the model" in message
    assert "blk.1.attn_sinks" in message


def test_wrong_shapes_are_named(gguf_of, tmp_path):
    contents = gguf_of("qwen2")
    contents.tensors["blk.0.ffn_up.weight"] = np.zeros((48, 16), np.float32)
    message = failure(contents.write(tmp_path / "m.gguf"))
    assert "blk.0.ffn_up.weight is (48, 16), expected (48, 32)" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "unknown tokenizer kind 'rwkv'; known are"),
        ({"tokenizer.ggml.pre": "klingon"}, "unknown pre-tokenizer 'klingon'; known"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q q"]}, "tokenizer tables disagree"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for 128"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999, with 128 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 128}, "repeats 127 tokens"),
        ({"qwen2.block_count": None}, "qwen2.block_count should be a number"),
        ({"qwen2.attention.head_count_kv": 3}, "num_kv_heads=3"),
        ({"qwen2.attention.value_length": 4}, "value_length is 4, expected the head"),
        ({"qwen2.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
    ],
)
def test_unusable_metadata_is_explained(changes, message, gguf_of, tmp_path):
    contents = gguf_of("qwen2")
    for key, value in changes.items():
        contents.metadata[key] = value
    contents.metadata = {k: v for k, v in contents.metadata.items() if v is not None}
    assert message in failure(contents.write(tmp_path / "m.gguf"))


def gemma_metadata(architecture, num_layers, **more):
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": ["a", "b"],
        f"{architecture}.block_count": num_layers,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": 48,
        f"{architecture}.feed_forward_length": 8,
        f"{architecture}.attention.head_count": 3,
        f"{architecture}.attention.key_length": 4,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.attention.sliding_window": 8,
        f"{architecture}.rope.freq_base": 1e6,
        **{f"{architecture}.{key}": value for key, value in more.items()},
    }


def read(metadata):
    return config_from_metadata(metadata, has_head=False, rope_divisors=None)


def test_gemma3_without_a_pattern_is_global_in_every_sixth_layer():
    config = read(gemma_metadata("gemma3", 7))
    assert config.sliding_windows == (8,) * 5 + (None, 8)
    assert [rope.base for rope in config.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert config.softmax_scale == 4**-0.5


def test_gemma2_is_global_in_every_second_layer_and_caps():
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    config = read(gemma_metadata("gemma2", 3, **caps))
    assert config.sliding_windows == (8, None, 8)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert not config.qk_norm


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_27b_gemmas_scale_by_the_hidden_size_per_head(architecture, layers):
    config = read(gemma_metadata(architecture, layers))
    assert config.softmax_scale == (48 // 3) ** -0.5
