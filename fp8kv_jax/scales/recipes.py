"""Recipes that stand beside scales in JSON files: which are ours to use."""

from collections.abc import Mapping
from typing import Any

from fp8kv_jax.calibration import Granularity
from fp8kv_jax.scales.scale_set import ScaleError

_STRATEGIES: Mapping[str, Granularity] = {"tensor": "tensor", "attn_head": "head"}
_FP8_DTYPES = ("fp8_e4m3", "fp8e4m3", "float8_e4m3fn")


def scheme_of(granularity: Granularity) -> dict[str, Any]:
    """Makes the `kv_cache_scheme` that says what our scales are."""
    strategies = {ours: theirs for theirs, ours in _STRATEGIES.items()}
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": strategies[granularity],
        "dynamic": False,
        "symmetric": True,
    }


def check_recipe(config: Mapping[str, Any], *, where: str) -> Granularity | None:
    """Refuses a recipe whose scales are not those of a static FP8 cache.

    Args:
      config: contents of a config.json, a quantization_config.json or a
        hf_quant_config.json; most say nothing of a KV cache.
      where: the file, for messages.

    Returns:
      The granularity that the recipe promises, None if it says nothing.

    Raises:
      ScaleError: if the cache is dynamic, asymmetric, of another type or width.
    """
    promised = None
    for part in _recipes(config, where):
        _check_algorithm(part.get("kv_cache_quant_algo"), where)
        if part.get("quant_method") == "quark":
            _check_quark(part, where)
        scheme = part.get("kv_cache_scheme")
        if scheme is not None:
            promised = _check_scheme(scheme, where)
    return promised


def _recipes(config: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Finds the objects in which the known producers keep a recipe."""
    nested = config.get("text_config")
    holders = [config, nested] if isinstance(nested, Mapping) else [config]
    # The last is hf_quant_config.json, and the config.json of a TensorRT-LLM engine.
    keys = ("quantization_config", "compression_config", "quantization")
    found = []
    for holder in holders:
        for key in keys:
            part = holder.get(key)
            if part is not None and not isinstance(part, Mapping):
                raise ScaleError(
                    f"Expected {key} in {where} to be an object, got {part!r:.40}."
                )
            if part is not None:
                found.append(part)
    return found


def _check_scheme(scheme: Any, where: str) -> Granularity | None:
    if not isinstance(scheme, Mapping):
        raise ScaleError(
            f"Expected kv_cache_scheme in {where} to be an object, got {scheme!r:.40}."
        )
    # What a key means that is left out, by the format: a missing type is an integer.
    wanted = {
        "num_bits": (8, 8),
        "type": ("float", "int"),
        "dynamic": (False, False),
        "symmetric": (True, True),
    }
    for key, (value, default) in wanted.items():
        got = scheme.get(key, default)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            shown = repr(got) if key in scheme else f"none, which means {default!r}"
            raise ScaleError(
                f"Expected {key}={value!r} in the kv_cache_scheme of {where}, that of "
                f"a static FP8 cache, got {shown}."
            )
    strategy = scheme.get("strategy")
    if strategy is None:
        return None
    if not isinstance(strategy, str) or strategy not in _STRATEGIES:
        raise ScaleError(
            f"Expected strategy 'tensor' or 'attn_head' in the kv_cache_scheme of "
            f"{where}, got {strategy!r}."
        )
    return _STRATEGIES[strategy]


def _check_algorithm(algorithm: Any, where: str) -> None:
    if algorithm not in (None, "FP8"):
        raise ScaleError(
            f"Expected kv_cache_quant_algo 'FP8' in {where}, got {algorithm!r}: its "
            "scales are those of another format."
        )


def _check_quark(part: Mapping[str, Any], where: str) -> None:
    layers = part.get("kv_cache_quant_config") or part.get("layer_quant_config") or {}
    for pattern, layer in layers.items() if isinstance(layers, Mapping) else ():
        outputs = layer.get("output_tensors") if isinstance(layer, Mapping) else None
        if not isinstance(outputs, Mapping) or not pattern.endswith(_CACHED):
            continue
        dtype = outputs.get("dtype")
        if dtype not in _FP8_DTYPES or outputs.get("is_dynamic"):
            raise ScaleError(
                f"Expected static output_tensors of dtype 'fp8_e4m3' for {pattern} in "
                f"{where}, got dtype {dtype!r}, "
                f"is_dynamic {outputs.get('is_dynamic')!r}."
            )


_CACHED = ("k_proj", "v_proj")
