"""Turns a Hugging Face config.json into a model configuration."""

from collections.abc import Mapping
from typing import Any

from models.config import Activation, ModelConfig
from models.loading.errors import ModelFileError
from models.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# What a config.json may leave out, because the family's own code has it as a default.
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        **_GEMMA_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        **_GEMMA_DEFAULTS,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
}


def config_from_json(values: Any) -> ModelConfig:
    """Reads the configuration.

    Raises:
      ModelFileError: if the architecture is unknown, or a key missing or unsupported.
    """
    if not isinstance(values, dict):
        raise ModelFileError("config.json is not a JSON object.")
    model_type = values.get("model_type")
    architecture = _ARCHITECTURES.get(str(model_type))
    if architecture is None:
        raise ModelFileError(
            f"unknown architecture {model_type!r} in config.json; known are "
            f"{', '.join(_ARCHITECTURES)}."
        )
    keys = _Keys({**_DEFAULTS[architecture], **_without_nulls(values, architecture)})
    _refuse_unsupported(keys, architecture)
    try:
        return _build(keys, architecture)
    except ModelFileError:
        raise
    except (ValueError, TypeError) as error:
        raise ModelFileError(f"config.json: {error}") from None


def _without_nulls(values: dict[str, Any], architecture: str) -> dict[str, Any]:
    # A null means "unset" for what has a default here, and "none" for a soft cap.
    kept = {"attn_logit_softcapping", "final_logit_softcapping"}
    defaults = _DEFAULTS[architecture]
    return {
        key: value
        for key, value in values.items()
        if value is not None or key in kept or key not in defaults
    }


class _Keys:
    """Reads keys of config.json and names the missing ones."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def optional(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFileError(
                f"{key} in config.json should be a number, found "
                f"{'nothing' if value is None else repr(value)[:80]}."
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def _build(keys: _Keys, architecture: str) -> ModelConfig:
    hidden_size = keys.integer("hidden_size")
    num_q_heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", hidden_size // num_q_heads)
    gemma = architecture.startswith("gemma")
    windows = _sliding_windows(keys, architecture)
    scale_dim = keys.number("query_pre_attn_scalar") if gemma else head_dim
    return ModelConfig(
        architecture=architecture,
        num_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_q_heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_context=keys.integer("max_position_embeddings"),
        ropes=_ropes(keys, architecture, windows),
        sliding_windows=windows,
        softmax_scale=scale_dim**-0.5,
        rms_norm_eps=float(keys.number("rms_norm_eps", 1e-6)),
        activation=_activation(keys),
        attention_soft_cap=keys.optional("attn_logit_softcapping") if gemma else None,
        logit_soft_cap=keys.optional("final_logit_softcapping") if gemma else None,
        tied_head=bool(keys.optional("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
    )


def _refuse_unsupported(keys: _Keys, architecture: str) -> None:
    # Qwen2's bias is part of the family, and its config.json has no such key.
    for key in ("attention_bias", "mlp_bias"):
        if keys.optional(key, False):
            raise ModelFileError(
                f"{key} in config.json is set: not supported for {architecture}."
            )
    if keys.optional("quantization_config") is not None:
        raise ModelFileError(
            "config.json has a quantization_config: quantized checkpoints are not "
            "supported."
        )
    if keys.optional("use_bidirectional_attention", False):
        raise ModelFileError("use_bidirectional_attention is not supported.")


def _activation(keys: _Keys) -> Activation:
    name = keys.optional("hidden_activation") or keys.optional("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelFileError(
            f"unknown activation {name!r} in config.json; known are "
            f"{', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _sliding_windows(keys: _Keys, architecture: str) -> tuple[int | None, ...]:
    num_layers = keys.integer("num_hidden_layers")
    gemma = architecture.startswith("gemma")
    if not gemma and not keys.optional("use_sliding_window", False):
        return (None,) * num_layers
    window = keys.integer("sliding_window")
    kinds = keys.optional("layer_types")
    if kinds is not None:
        known = {"full_attention": None, "sliding_attention": window}
        unknown = sorted(set(kinds) - set(known))
        if unknown:
            raise ModelFileError(f"unknown layer_types in config.json: {unknown}.")
        return tuple(known[kind] for kind in kinds)
    if gemma:
        every = keys.integer("sliding_window_pattern")
        return tuple(window if (i + 1) % every else None for i in range(num_layers))
    first = keys.integer("max_window_layers", num_layers)
    return tuple(window if i >= first else None for i in range(num_layers))


def _ropes(
    keys: _Keys, architecture: str, windows: tuple[int | None, ...]
) -> tuple[Rope, ...]:
    # Newer files hold one object per kind of layer, or one for all, in
    # rope_parameters; older ones spread the same over several keys.
    new = keys.optional("rope_parameters")
    old = {
        "rope_theta": keys.number("rope_theta", 10_000.0),
        **keys.optional("rope_scaling", {}),
    }
    everywhere = local = new or old
    if architecture == "gemma3":
        if new and "full_attention" in new:
            everywhere, local = new["full_attention"], new["sliding_attention"]
        else:
            local = {"rope_theta": keys.number("rope_local_base_freq")}
    return tuple(
        _rope(everywhere if window is None else local, keys) for window in windows
    )


def _rope(values: Mapping[str, Any], keys: _Keys) -> Rope:
    part = values.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ModelFileError(f"partial_rotary_factor {part} is not supported.")
    base = values.get("rope_theta", keys.number("rope_theta", 10_000.0))
    return Rope(base=float(base), scaling=_scaling(values))


def _scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(factor=float(values["factor"]))
            case "llama3":
                return Llama3Scaling(
                    factor=float(values["factor"]),
                    low_freq_factor=float(values["low_freq_factor"]),
                    high_freq_factor=float(values["high_freq_factor"]),
                    original_max_context=values["original_max_position_embeddings"],
                )
    except KeyError as error:
        raise ModelFileError(f"rope scaling {kind!r} lacks {error}.") from None
    raise ModelFileError(
        f"rope scaling {kind!r} is not supported; known are default, linear, llama3."
    )
