"""Turns a GGUF file's metadata into a model configuration."""

from collections.abc import Mapping
from typing import Any

from models.config import KNOWN_ARCHITECTURES, ModelConfig
from models.loading.errors import ModelFileError
from models.rope import FrequencyDivisors, LinearScaling, Rope, RopeScaling

# Every n-th layer of these families attends to everything, the others to a window.
# The files of both families were made before there was a key for it.
_GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6}
# The 27B models scale q . k by the hidden size per head; known by their depth.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GEMMA3_LOCAL_ROPE_BASE = 10_000.0


def config_from_metadata(
    metadata: Mapping[str, Any],
    *,
    has_head: bool,
    rope_divisors: tuple[float, ...] | None,
) -> ModelConfig:
    """Reads the configuration.

    Args:
      metadata: the file's keys and values.
      has_head: the file holds a head apart from the embedding.
      rope_divisors: the file's `rope_freqs`, if it has them.

    Raises:
      ModelFileError: if the architecture is unknown, or a key missing or unsupported.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in KNOWN_ARCHITECTURES:
        raise ModelFileError(
            f"unknown architecture {architecture!r}; known are "
            f"{', '.join(KNOWN_ARCHITECTURES)}."
        )
    keys = _Keys(metadata, architecture)
    num_layers = keys.integer("block_count")
    hidden_size = keys.integer("embedding_length")
    num_q_heads = keys.integer("attention.head_count")
    head_dim = _head_dim(keys, hidden_size // num_q_heads)
    gemma = architecture.startswith("gemma")
    large_gemma = num_layers == _LAYERS_OF_27B.get(architecture)
    windows = _sliding_windows(keys, num_layers)
    try:
        return ModelConfig(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_q_heads=num_q_heads,
            num_kv_heads=keys.integer("attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            intermediate_size=keys.integer("feed_forward_length"),
            vocab_size=len(keys.tokens()),
            max_context=keys.integer("context_length"),
            ropes=_ropes(keys, windows, rope_divisors),
            sliding_windows=windows,
            softmax_scale=(hidden_size // num_q_heads if large_gemma else head_dim)
            ** -0.5,
            rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            activation="gelu_tanh" if gemma else "silu",
            attention_soft_cap=keys.optional("attn_logit_softcapping"),
            logit_soft_cap=keys.optional("final_logit_softcapping"),
            tied_head=not has_head,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture in ("qwen3", "gemma3"),
            sandwich_norms=gemma,
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(str(error)) from None


class _Keys:
    """Reads keys of one architecture and names the missing ones."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self.architecture = architecture

    def optional(self, key: str) -> Any:
        return self._metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise ModelFileError(
                f"metadata key {self.architecture}.{key} should be a number, "
                f"found {'nothing' if value is None else repr(value)[:80]}."
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def tokens(self) -> list[str]:
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise ModelFileError("no tokenizer (no key tokenizer.ggml.tokens).")
        return tokens


def _head_dim(keys: _Keys, default: int) -> int:
    head_dim = keys.integer("attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = keys.integer(key, head_dim)
        if size != head_dim:
            raise ModelFileError(
                f"{keys.architecture}.{key} is {size}, expected the head_dim "
                f"{head_dim}: values of another size and rotary embeddings of a part "
                "of the head are not supported."
            )
    return head_dim


def _sliding_windows(keys: _Keys, num_layers: int) -> tuple[int | None, ...]:
    every = _GLOBAL_EVERY.get(keys.architecture)
    if every is None:
        return (None,) * num_layers
    window = keys.integer("attention.sliding_window")
    pattern = keys.optional("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ModelFileError(
                f"sliding_window_pattern has {len(pattern)} entries for {num_layers} "
                "layers."
            )
        return tuple(window if local else None for local in pattern)
    every = pattern or every
    return tuple(window if (i + 1) % every else None for i in range(num_layers))


def _ropes(
    keys: _Keys,
    windows: tuple[int | None, ...],
    divisors: tuple[float, ...] | None,
) -> tuple[Rope, ...]:
    rope = Rope(
        base=float(keys.number("rope.freq_base", 10_000.0)),
        scaling=_scaling(keys, divisors),
    )
    local = rope
    if keys.architecture == "gemma3":
        base = keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_BASE)
        local = Rope(base=float(base))
    return tuple(rope if window is None else local for window in windows)


def _scaling(keys: _Keys, divisors: tuple[float, ...] | None) -> RopeScaling | None:
    if divisors is not None:
        return FrequencyDivisors(divisors=divisors)
    kind = keys.optional("rope.scaling.type")
    if kind in (None, "none"):
        # Old files wrote a linear factor under another key and no type.
        factor = keys.number("rope.scale_linear", 1.0)
    elif kind == "linear":
        factor = keys.number("rope.scaling.factor")
    else:
        raise ModelFileError(
            f"rope scaling {kind!r} is not supported; known are none, linear and "
            "divisors in a rope_freqs tensor."
        )
    return None if factor == 1.0 else LinearScaling(factor=float(factor))
