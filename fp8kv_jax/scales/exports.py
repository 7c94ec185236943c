"""Exports scales to the files that other projects load, and to nothing but those."""

import importlib.metadata
import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fp8kv_jax.calibration import Granularity
from fp8kv_jax.scales import spellings
from fp8kv_jax.scales.digest import DIGEST_KEY, digest_tensors
from fp8kv_jax.scales.files import write_file
from fp8kv_jax.scales.recipes import scheme_of
from fp8kv_jax.scales.scale_files import LEGACY_FILE, list_layers, shorten
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

type ExportFormat = Literal["vllm", "compressed-tensors", "modelopt", "legacy-json"]
type ScaleDtype = Literal["float32", "bf16"]

SCALES_FILE = "kv_scales.safetensors"


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How one project names scales, and the recipe it reads beside them.

    Attributes:
      tail: what follows the attention block; `{0}` is "k" or "v".
      tensor_shape: shape of a scale per tensor.
      heads: can hold scales per head.
      recipe: makes the recipe's file name and contents.
    """

    tail: str
    tensor_shape: tuple[int, ...] = (1,)
    heads: bool = True
    recipe: Callable[[Granularity], tuple[str, dict[str, Any]]]


def _scheme_file(granularity: Granularity) -> tuple[str, dict[str, Any]]:
    config = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme_of(granularity),
    }
    return "quantization_config.json", {"quantization_config": config}


def _modelopt_file(granularity: Granularity) -> tuple[str, dict[str, Any]]:
    version = importlib.metadata.version("fp8kv-jax")
    return "hf_quant_config.json", {
        "producer": {"name": "fp8kv-jax", "version": version},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
    }


_LAYOUTS: Mapping[str, _Layout] = {
    "vllm": _Layout(tail="attn.{0}_scale", recipe=_scheme_file),
    "compressed-tensors": _Layout(tail="{0}_scale", recipe=_scheme_file),
    "modelopt": _Layout(
        tail="{0}_proj.{0}_scale", tensor_shape=(), heads=False, recipe=_modelopt_file
    ),
}


def export_scales(
    scale_set: ScaleSet,
    folder: str | os.PathLike[str],
    *,
    format: ExportFormat,
    dtype: ScaleDtype = "float32",
    names: Iterable[str] | None = None,
    model_type: str | None = None,
) -> list[Path]:
    """Writes scales, and the recipe that goes with them, into a folder.

    Args:
      scale_set: the scales; all of them are written.
      folder: made if absent. A file there is never overwritten by another one.
      format: whose names to use. "legacy-json" and "modelopt" hold scales per tensor
        only.
      dtype: "bf16" rounds each scale up, never down: one that is too small clips.
      names: names of the model's own tensors. If given, each layer must have its keys
        among them, and the exported names begin as theirs do.
      model_type: the model's family, which "legacy-json" names.

    Returns:
      The files.

    Warns:
      UserWarning: if K and V have to share a scale ("legacy-json"): the larger one.

    Raises:
      ScaleError: if the scales are not sound, the format can't hold them, the names
        don't fit them, or a file stands in the way.
      OSError: if the file system refuses.
    """
    scale_set.check()
    if format == "legacy-json":
        _stems(scale_set.layers, names)  # its layers have no names, but must exist
        files = {LEGACY_FILE: _legacy_json(scale_set, dtype, model_type)}
    else:
        name, recipe = _layout(format).recipe(scale_set.granularity)
        files = {
            name: _json_bytes(recipe),
            # Last: half of an export is a recipe without scales, which loads nowhere.
            SCALES_FILE: _safetensors_bytes(
                export_tensors(scale_set, format=format, dtype=dtype, names=names)
            ),
        }
    return _write_all(Path(folder), files)


def export_tensors(
    scale_set: ScaleSet,
    *,
    format: ExportFormat,
    dtype: ScaleDtype = "float32",
    names: Iterable[str] | None = None,
) -> dict[str, np.ndarray]:
    """Makes the tensors that `export_scales` writes, by name; see there."""
    layout = _layout(format)
    per_head = scale_set.granularity == "head"
    if per_head and not layout.heads:
        raise ScaleError(_no_heads(scale_set, format))
    shape = (scale_set.groups, 1, 1) if per_head else layout.tensor_shape
    stems = _stems(scale_set.layers, names)
    k_scale = _as_dtype(scale_set.k_scale, dtype)
    v_scale = _as_dtype(scale_set.v_scale, dtype)
    tensors = {}
    for row, layer in enumerate(scale_set.layers):
        for letter, scale in (("k", k_scale), ("v", v_scale)):
            name = stems[layer] + layout.tail.format(letter)
            tensors[name] = scale[row].reshape(shape)
    return tensors


def round_up_to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds positive float32 to the nearest bfloat16 that is not smaller.

    A scale that is rounded down no longer covers the largest value that it was made
    for. With bfloat16's 8 bits, up costs less than 1 % of the scale.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # A bfloat16 is the upper half of a float32, and positive floats sort as their bits
    # do: whatever the lower half holds carries into the upper.
    upper = (bits + np.uint32(0xFFFF)) >> np.uint32(16)
    return upper.astype(np.uint16).view(jnp.bfloat16.dtype)


def _as_dtype(values: np.ndarray, dtype: ScaleDtype) -> np.ndarray:
    if dtype not in ("float32", "bf16"):
        raise ScaleError(f"Expected dtype 'float32' or 'bf16', got {dtype!r}.")
    return round_up_to_bf16(values) if dtype == "bf16" else values.astype(np.float32)


def _layout(format: str) -> _Layout:
    if format not in _LAYOUTS:
        known = ", ".join(map(repr, (*_LAYOUTS, "legacy-json")))
        raise ScaleError(f"Expected format to be one of {known}, got {format!r}.")
    return _LAYOUTS[format]


def _no_heads(scale_set: ScaleSet, format: str) -> str:
    return (
        f"Expected scales per tensor, all that {format} can hold, got "
        f"{scale_set.groups} per layer, one for each KV head: calibrate with "
        "granularity 'tensor', or export to vllm or compressed-tensors."
    )


# Names.


def _stems(layers: tuple[int, ...], names: Iterable[str] | None) -> dict[int, str]:
    """Finds what the names of a layer's scales begin with, the last dot included."""
    if names is None:
        return {layer: f"model.layers.{layer}.self_attn." for layer in layers}
    names = list(names)
    found: dict[int, set[str]] = defaultdict(set)
    for name in names:
        match = _KEYS.fullmatch(name)
        if match:
            found[int(match["layer"])].add(match["stem"])
    lost = [layer for layer in layers if layer not in found]
    if lost:
        keys = [name for names in found.values() for name in names]
        shown = shorten(sorted(keys) or names) or "none"
        raise ScaleError(
            f"Expected the model's tensors to include the K projections of layers "
            f"{list_layers(lost)}, such as model.layers.{lost[0]}.self_attn.k_proj."
            f"weight, got {shown}."
        )
    twice = [layer for layer in layers if len(found[layer]) > 1]
    if twice:
        raise ScaleError(
            f"Expected one attention in layer {twice[0]} of the model, got "
            f"{shorten(sorted(found[twice[0]]))}."
        )
    return {layer: found[layer].pop() for layer in layers}


# What holds keys: a projection of its own, or a fused one.
_KEYS = re.compile(
    rf"(?P<stem>{spellings.PREFIX}{spellings.LAYER}\.{spellings.BLOCK}\.)"
    r"(?:k_proj|qkv_proj|qkv|kv_proj|Wqkv|query_key_value|c_attn)\..+"
)


# Bytes and files.


def _safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Lays out a safetensors file: length of the header, header, data.

    The package's own writer orders the metadata anew each time, and equal scales
    should give equal files.
    """
    # Readers for PyTorch look for "format".
    metadata = {"format": "pt", DIGEST_KEY: digest_tensors(tensors)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {
            "dtype": _STORED[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Data begin at a multiple of 8.
    encoded += b" " * (-len(encoded) % 8)
    data = b"".join(values.tobytes() for values in tensors.values())
    return len(encoded).to_bytes(8, "little") + encoded + data


_STORED = {"float32": "F32", "bfloat16": "BF16"}


def _legacy_json(
    scale_set: ScaleSet, dtype: ScaleDtype, model_type: str | None
) -> bytes:
    if scale_set.granularity == "head":
        raise ScaleError(_no_heads(scale_set, "legacy-json"))
    k_scale, v_scale = scale_set.k_scale, scale_set.v_scale
    unlike = np.flatnonzero((k_scale != v_scale).any(axis=1))
    if unlike.size:
        warnings.warn(
            "legacy-json has one number for K and V: the larger scale is written in "
            f"layers {list_layers(scale_set.layers[row] for row in unlike)}.",
            UserWarning,
            stacklevel=3,
        )
    values = _as_dtype(np.maximum(k_scale, v_scale), dtype).astype(np.float32)
    # A float32 is exact as a double, and a double as its shortest decimal.
    factors = {
        str(layer): float(values[row, 0]) for row, layer in enumerate(scale_set.layers)
    }
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    return _json_bytes({"model_type": model_type, "kv_cache": cache})


def _json_bytes(contents: Mapping[str, Any]) -> bytes:
    return (json.dumps(contents, indent=2, allow_nan=False) + "\n").encode()


def _write_all(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes files one after the other, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    new = {}
    for name, data in files.items():
        target = folder / name
        if not target.exists():
            new[target] = data
        elif target.read_bytes() != data:
            raise ScaleError(
                f"Expected no other {name} in {folder}, found one: remove it, or "
                "export to a new folder."
            )
    for target, data in new.items():
        write_file(target, data)
    return [folder / name for name in files]
