"""Reads a Hugging Face directory: its configuration, its weights and its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from flax import nnx
from jaxtyping import DTypeLike

from models.config import ModelConfig
from models.loading.checkpoint import TensorFile, load_params, shorten
from models.loading.errors import ModelFileError
from models.loading.hf_config import config_from_json
from models.loading.hf_tokenizer import tokenizer_from_directory
from models.loading.json_file import read_json
from models.tokenizer import Tokenizer

_LAYER_NAMES = {
    "attention_norm.scale": "model.layers.{i}.input_layernorm.weight",
    "attention.q.kernel": "model.layers.{i}.self_attn.q_proj.weight",
    "attention.k.kernel": "model.layers.{i}.self_attn.k_proj.weight",
    "attention.v.kernel": "model.layers.{i}.self_attn.v_proj.weight",
    "attention.q.bias": "model.layers.{i}.self_attn.q_proj.bias",
    "attention.k.bias": "model.layers.{i}.self_attn.k_proj.bias",
    "attention.v.bias": "model.layers.{i}.self_attn.v_proj.bias",
    "attention.out.kernel": "model.layers.{i}.self_attn.o_proj.weight",
    "attention.q_norm.scale": "model.layers.{i}.self_attn.q_norm.weight",
    "attention.k_norm.scale": "model.layers.{i}.self_attn.k_norm.weight",
    "mlp_norm.scale": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp.gate.kernel": "model.layers.{i}.mlp.gate_proj.weight",
    "mlp.up.kernel": "model.layers.{i}.mlp.up_proj.weight",
    "mlp.down.kernel": "model.layers.{i}.mlp.down_proj.weight",
}
# With sandwich norms the same name means another norm: what follows the attention.
_SANDWICH_NAMES = _LAYER_NAMES | {
    "attention_out_norm.scale": "model.layers.{i}.post_attention_layernorm.weight",
    "mlp_norm.scale": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "mlp_out_norm.scale": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_MODEL_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
}
_INDEX = "model.safetensors.index.json"


def load_hf_directory(
    path: Path, dtype: DTypeLike
) -> tuple[ModelConfig, nnx.GraphDef, dict[str, Any], Tokenizer]:
    """Loads everything such a directory holds; see `models.loading.load_model`."""
    try:
        config = config_from_json(read_json(path / "config.json"))
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from None
    tokenizer = tokenizer_from_directory(path)
    sandwich = config.sandwich_norms
    graphdef, params = load_params(
        config,
        _tensor_file(path, tied_head=config.tied_head),
        layer_names=_SANDWICH_NAMES if sandwich else _LAYER_NAMES,
        model_names=_MODEL_NAMES,
        dtype=dtype,
        convert=_gemma_norm if config.architecture.startswith("gemma") else _unchanged,
    )
    return config, graphdef, params, tokenizer


def _unchanged(path: str, values: np.ndarray) -> np.ndarray:
    return values


def _gemma_norm(path: str, values: np.ndarray) -> np.ndarray:
    """Adds the 1 that Gemma's own code adds to each norm scale."""
    if path.endswith("norm.scale"):
        return values.astype(np.float32) + np.float32(1.0)
    return values


def _tensor_file(path: Path, *, tied_head: bool) -> TensorFile:
    file_of = _file_of_tensor(path)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(file_of.values())):
        with _open(file) as opened:
            present = set(opened.keys())
            promised = {name for name, where in file_of.items() if where == file}
            if not promised <= present:
                lost = shorten(sorted(promised - present))
                raise ModelFileError(
                    f"{path.name}: {file.name} lacks tensors that {_INDEX} places "
                    f"there: {lost}."
                )
            for name in promised:
                shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(name: str) -> np.ndarray:
        with _open(file_of[name]) as opened:
            values = opened.get_tensor(name)
        if values.dtype.name not in _FLOATS:
            raise ModelFileError(
                f"{path.name}: tensor {name} is {values.dtype.name}, expected one of "
                f"{', '.join(_FLOATS)}; quantized checkpoints are not supported."
            )
        return values

    def ignored(name: str) -> bool:
        # Old exports store the rotary frequencies, and the tied head a second time.
        if name.endswith("rotary_emb.inv_freq"):
            return True
        return tied_head and name == _MODEL_NAMES["head"]

    return TensorFile(label=path.name, shapes=shapes, read=read, ignored=ignored)


_FLOATS = ("float32", "float16", "bfloat16")


def _file_of_tensor(path: Path) -> Mapping[str, Path]:
    if not (path / _INDEX).exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{path.name}: no *.safetensors file.")
        return _names_of_files(path, files)
    index = read_json(path / _INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path.name}: {_INDEX} has no weight_map.")
    absent = sorted({n for n in weight_map.values() if not (path / n).is_file()})
    if absent:
        raise ModelFileError(
            f"{path.name}: files named by {_INDEX} are missing: {shorten(absent)}."
        )
    return {name: path / file for name, file in weight_map.items()}


def _names_of_files(path: Path, files: list[Path]) -> Mapping[str, Path]:
    file_of: dict[str, Path] = {}
    for file in files:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name in file_of:
                    raise ModelFileError(
                        f"{path.name}: tensor {name} is in {file_of[name].name} and "
                        f"in {file.name}."
                    )
                file_of[name] = file
    return file_of


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{file.name}: not a whole safetensors file ({error})."
        ) from None
