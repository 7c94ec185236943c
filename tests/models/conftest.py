"""Fixtures of the model tests: the tiny models, and GGUF files written from them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models.full_attention import full_attention
from models.loading import LoadedModel, load_model
from models.rope import Rope, inverse_frequencies

DATA = Path(__file__).parent / "data"
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, LoadedModel]:
    return {name: load_model(DATA / f"tiny_{name}", jnp.float32) for name in FAMILIES}


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., np.ndarray]:
    """Runs a model over whole sequences without a cache."""

    def run(model: LoadedModel, token_ids: Any, **options: Any) -> np.ndarray:
        token_ids = jnp.asarray(token_ids, jnp.int32)
        positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions[None, :], token_ids.shape)
        forward = jax.jit(model.forward, static_argnames="attend")
        logits, _ = forward(
            model.params,
            token_ids,
            positions,
            attend=full_attention,
            carry=None,
            **options,
        )
        return np.asarray(logits)

    return run


@dataclasses.dataclass
class GgufContents:
    """What `write` puts into a GGUF file; a test edits it first."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


@pytest.fixture(scope="session")
def gguf_of(tiny_models: dict[str, LoadedModel]) -> Callable[[str], GgufContents]:
    """Describes a tiny model as a GGUF file, the way llama.cpp converts one."""

    def describe(name: str) -> GgufContents:
        model = tiny_models[name]
        weights = safetensors.numpy.load_file(DATA / f"tiny_{name}/model.safetensors")
        tensors = {
            _gguf_name(key, gemma=name.startswith("gemma")): values.astype(np.float32)
            for key, values in weights.items()
        }
        config = model.config
        if name == "llama":
            heads = {"attn_q": config.num_q_heads, "attn_k": config.num_kv_heads}
            for key, values in tensors.items():
                if key.split(".")[-2] in heads:
                    tensors[key] = _interleave(values, heads[key.split(".")[-2]])
            scaled = inverse_frequencies(config.ropes[0], config.head_dim)
            plain = inverse_frequencies(
                Rope(base=config.ropes[0].base), config.head_dim
            )
            tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
        if name.startswith("gemma"):
            for key, values in tensors.items():
                if key.endswith("norm.weight"):
                    tensors[key] = values + np.float32(1.0)
        metadata = _model_metadata(name, model) | _tokenizer_metadata(model)
        return GgufContents(name, metadata, tensors)

    return describe


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Moves row i + j * head_dim / 2 of each head to row 2 i + j, one at a time."""
    head_dim = values.shape[0] // num_heads
    moved = np.empty_like(values)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for j in range(2):
                source = head * head_dim + j * (head_dim // 2) + i
                moved[head * head_dim + 2 * i + j] = values[source]
    return moved


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(name: str, *, gemma: bool) -> str:
    names = _GEMMA_NAMES if gemma else _GGUF_NAMES
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"


def _model_metadata(name: str, model: LoadedModel) -> dict[str, Any]:
    config = model.config
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.ropes[1].base,
    }
    if name == "gemma3":
        values |= {
            "attention.sliding_window": 5,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        }
    return {f"{name}.{key}": value for key, value in values.items()}


def _tokenizer_metadata(model: LoadedModel) -> dict[str, Any]:
    backend = model.tokenizer.backend
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    types = [3 if model.tokenizer.is_special(i) else 1 for i in range(len(tokens))]
    padding = model.config.vocab_size - len(tokens)
    tokens += [f"[PAD{index}]" for index in range(padding)]
    types += [5] * padding
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["t h", "th e", "a n", "i n", "an d"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": model.tokenizer.chat_template,
    }
