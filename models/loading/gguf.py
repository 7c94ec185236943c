"""Reads a GGUF file: its configuration, its tensors and its tokenizer."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from models.config import ModelConfig
from models.loading.checkpoint import TensorFile, load_params
from models.loading.errors import ModelFileError
from models.loading.gguf_config import config_from_metadata
from models.loading.gguf_tokenizer import tokenizer_from_metadata
from models.tokenizer import Tokenizer

_LAYER_NAMES = {
    "attention_norm.scale": "blk.{i}.attn_norm.weight",
    "attention.q.kernel": "blk.{i}.attn_q.weight",
    "attention.k.kernel": "blk.{i}.attn_k.weight",
    "attention.v.kernel": "blk.{i}.attn_v.weight",
    "attention.q.bias": "blk.{i}.attn_q.bias",
    "attention.k.bias": "blk.{i}.attn_k.bias",
    "attention.v.bias": "blk.{i}.attn_v.bias",
    "attention.out.kernel": "blk.{i}.attn_output.weight",
    "attention.q_norm.scale": "blk.{i}.attn_q_norm.weight",
    "attention.k_norm.scale": "blk.{i}.attn_k_norm.weight",
    "attention_out_norm.scale": "blk.{i}.post_attention_norm.weight",
    "mlp_norm.scale": "blk.{i}.ffn_norm.weight",
    "mlp.gate.kernel": "blk.{i}.ffn_gate.weight",
    "mlp.up.kernel": "blk.{i}.ffn_up.weight",
    "mlp.down.kernel": "blk.{i}.ffn_down.weight",
    "mlp_out_norm.scale": "blk.{i}.post_ffw_norm.weight",
}
_MODEL_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm.scale": "output_norm.weight",
    "head": "output.weight",
}
# Divisors of the rotary frequencies; part of the configuration, not of the model.
_ROPE_DIVISORS = "rope_freqs.weight"
# What reading past the end of a cut file, or a random one, raises in the reader.
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, MemoryError, struct.error)


def load_gguf(
    path: Path, dtype: DTypeLike
) -> tuple[ModelConfig, nnx.GraphDef, dict[str, Any], Tokenizer]:
    """Loads everything a GGUF file holds; see `models.loading.load_model`."""
    reader = _open(path)
    metadata = _metadata(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        divisors = _rope_divisors(tensors)
        config = config_from_metadata(
            metadata, has_head="output.weight" in tensors, rope_divisors=divisors
        )
        tokenizer = tokenizer_from_metadata(metadata)
    except ModelFileError as error:
        raise ModelFileError(f"{path.name}: {error}") from None
    graphdef, params = load_params(
        config,
        _tensor_file(path, tensors),
        layer_names=_LAYER_NAMES,
        model_names=_MODEL_NAMES,
        dtype=dtype,
        convert=_Unpermute(config) if config.architecture == "llama" else _unchanged,
    )
    return config, graphdef, params, tokenizer


class _Reader(gguf.GGUFReader):
    """The package's reader, quicker and strict about the end of the file.

    On a plain array it is five times as fast as on the memmap it opens. And a slice
    past the end is an error: as it comes, a damaged array length would make it read
    nothing a billion times.
    """

    @property
    def data(self) -> np.ndarray:  # pyrefly: ignore
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)

    def _get(
        self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None
    ) -> np.ndarray:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > self._data.size:
            raise ValueError(f"it refers to byte {end}")
        return super()._get(offset, dtype, count, override_order)


def _open(path: Path) -> gguf.GGUFReader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError(
            f"{path.name}: not a GGUF file (it starts with {magic!r}, expected b'GGUF')."
        )
    try:
        with np.errstate(all="ignore"):
            return _Reader(path)
    except _DAMAGE as error:
        size = path.stat().st_size
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFileError(
            f"{path.name}: cut off or damaged: its {size} bytes do not hold what its "
            f"header lists ({reason})."
        ) from None


def _metadata(reader: gguf.GGUFReader, path: Path) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except _DAMAGE as error:
        raise ModelFileError(f"{path.name}: unreadable metadata ({error}).") from None


def _tensor_file(path: Path, tensors: Mapping[str, gguf.ReaderTensor]) -> TensorFile:
    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelFileError(
                f"{path.name}: tensor {name} is of type {tensor.tensor_type.name}, "
                f"which cannot be read ({error})."
            ) from None

    shapes = {
        name: tuple(int(size) for size in reversed(tensor.shape))
        for name, tensor in tensors.items()
    }
    return TensorFile(
        label=path.name,
        shapes=shapes,
        read=read,
        ignored=lambda name: name == _ROPE_DIVISORS,
    )


def _rope_divisors(
    tensors: Mapping[str, gguf.ReaderTensor],
) -> tuple[float, ...] | None:
    if _ROPE_DIVISORS not in tensors:
        return None
    tensor = tensors[_ROPE_DIVISORS]
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return tuple(values.ravel().astype(float).tolist())


def _unchanged(path: str, values: np.ndarray) -> np.ndarray:
    return values


class _Unpermute:
    """Puts q and k rows of a Llama GGUF back into the half-split rotary order.

    Such files interleave the two halves of each head: row 2 i + j of the file is row
    i + j * head_dim / 2 of the original. With the rows as they come, SmolLM2 answers
    with a perplexity of 215 instead of 26.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._heads = {"q": config.num_q_heads, "k": config.num_kv_heads}

    def __call__(self, path: str, values: np.ndarray) -> np.ndarray:
        block, _, projection = path.partition(".")
        name = projection.partition(".")[0]
        if block != "attention" or name not in self._heads:
            return values
        pairs = values.reshape(self._heads[name], -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
