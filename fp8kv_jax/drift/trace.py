"""Recorded K/V traces: real keys and values of some texts, as a safetensors file.

A text NAME is three tensors: `NAME.k` and `NAME.v`, `[num_layers, num_tokens,
num_kv_heads, head_dim]`, keys after the rotary embedding, and `NAME.tokens`
`[num_tokens]`, which may be absent. The class of a text is its name up to the first
slash: `code/3` is a text of `code`.
"""

import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import BFloat16, Int32

from fp8kv_jax.scales.files import LEFTOVER

type Rows = BFloat16[np.ndarray, "num_layers num_tokens num_kv_heads head_dim"]

_STORED_FLOATS = ("BF16", "F16", "F32")
_STORED_IDS = ("I32", "I64")
_KINDS = ("k", "v", "tokens")


class TraceError(ValueError):
    """A file is no trace of keys and values, or not the one expected."""


class TraceText(NamedTuple):
    """One text of a trace."""

    name: str
    num_tokens: int
    has_token_ids: bool

    @property
    def data_class(self) -> str:
        return self.name.partition("/")[0]


class TraceShape(NamedTuple):
    """What all texts of a trace share."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace that is open for reading; rows are read when asked for.

    Attributes:
      path: the file.
      shape: layers, KV heads and head size.
      texts: in the order of the file.
      metadata: what the recorder noted about it.
    """

    path: Path
    shape: TraceShape
    texts: tuple[TraceText, ...]
    metadata: Mapping[str, str]
    _file: Any

    @property
    def num_tokens(self) -> int:
        return sum(text.num_tokens for text in self.texts)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text.data_class for text in self.texts))

    def rows(self, name: str, start: int, stop: int) -> tuple[Rows, Rows]:
        """Reads K and V of some tokens of a text, rounded to BF16 as a cache does."""
        k, v = (
            self._file.get_slice(f"{name}.{kind}")[:, start:stop].astype(jnp.bfloat16)
            for kind in ("k", "v")
        )
        return k, v

    def blocks(self, name: str, size: int) -> Iterator[tuple[int, Rows, Rows]]:
        """Streams a text, `size` tokens at a time: `(start, k, v)`."""
        num_tokens = next(t.num_tokens for t in self.texts if t.name == name)
        for start in range(0, num_tokens, size):
            yield start, *self.rows(name, start, min(start + size, num_tokens))

    def token_ids(self, name: str) -> Int32[np.ndarray, "num_tokens"]:
        """Reads the token ids of a text.

        Raises:
          TraceError: if the trace was recorded without.
        """
        if not next(t.has_token_ids for t in self.texts if t.name == name):
            raise TraceError(
                f"Expected {name}.tokens in {self.path.name}, the token ids of the "
                "text: the trace was recorded without."
            )
        return self._file.get_tensor(f"{name}.tokens").astype(np.int32)


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Opens a trace and checks names, types and shapes, but not a single value.

    Raises:
      TraceError: if the file can't be read, is damaged or is no trace.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"Expected {path} to be a K/V trace, found no such file.")
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise TraceError(
            f"Expected {path.name} to be a whole safetensors file ({error})."
        ) from None
    texts: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in file.offset_keys():
        name, _, kind = tensor.rpartition(".")
        if not name or kind not in _KINDS:
            raise TraceError(
                f"Expected tensors NAME.k, NAME.v and NAME.tokens in {path.name}, got "
                f"{tensor!r:.60}: a trace holds keys and values of texts."
            )
        stored = file.get_slice(tensor)
        wanted = _STORED_IDS if kind == "tokens" else _STORED_FLOATS
        if stored.get_dtype() not in wanted:
            raise TraceError(
                f"Expected {tensor} in {path.name} to be of type {', '.join(wanted)}, "
                f"got {stored.get_dtype()}."
            )
        texts.setdefault(name, {})[kind] = tuple(stored.get_shape())
    if not texts:
        raise TraceError(f"Expected a text in {path.name}, got none.")
    shape = _check_texts(path, texts)
    return Trace(
        path=path,
        shape=shape,
        texts=tuple(
            TraceText(name, found["k"][1], "tokens" in found)
            for name, found in texts.items()
        ),
        metadata=file.metadata() or {},
        _file=file,
    )


def _check_texts(
    path: Path, texts: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> TraceShape:
    """Refuses tensors that do not belong together; returns what all texts share."""
    first: tuple[str, TraceShape] | None = None
    for name, found in texts.items():
        missing = [kind for kind in ("k", "v") if kind not in found]
        if missing:
            raise TraceError(
                f"Expected {name}.{missing[0]} in {path.name} beside "
                f"{name}.{next(iter(found))}, got none."
            )
        k = found["k"]
        if len(k) != 4 or 0 in k:
            raise TraceError(
                f"Expected {name}.k in {path.name} to be [num_layers, num_tokens, "
                f"num_kv_heads, head_dim], none of them 0, got {list(k)}."
            )
        if found["v"] != k:
            raise TraceError(
                f"Expected {name}.v in {path.name} to be {list(k)}, the shape of "
                f"{name}.k, got {list(found['v'])}."
            )
        if found.get("tokens", (k[1],)) != (k[1],):
            raise TraceError(
                f"Expected {name}.tokens in {path.name} to be [{k[1]}], the tokens of "
                f"{name}.k, got {list(found['tokens'])}."
            )
        shape = TraceShape(k[0], k[2], k[3])
        first = first or (name, shape)
        if shape != first[1]:
            raise TraceError(
                f"Expected {name}.k in {path.name} to have the layers, KV heads and "
                f"head size of {first[0]}.k, {list(first[1])}, got {list(shape)}."
            )
    assert first is not None
    return first[1]


def write_trace(
    path: Path,
    token_ids: Mapping[str, Int32[np.ndarray, "num_tokens"]],
    rows: Iterable[tuple[Rows, Rows]],
    *,
    shape: TraceShape,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a trace one text at a time; it appears as a whole or not at all.

    Args:
      path: where; a file that is there is replaced.
      token_ids: of each text, by name, in the order to write.
      rows: K and V of each text in that order; drawn one by one.
      shape: what all texts share.
      metadata: notes for the file's header.

    Raises:
      ValueError: if rows have another shape than the text's.
      OSError: if the file system refuses.
    """
    built = path.with_name(f".{path.name}{LEFTOVER}{secrets.token_hex(6)}")
    try:
        with built.open("xb") as file:
            file.write(_header(token_ids, shape, metadata or {}))
            for (name, ids), (k, v) in zip(token_ids.items(), rows, strict=True):
                _write_text(file, name, np.asarray(ids, np.int32), k, v, shape)
            file.flush()
            os.fsync(file.fileno())
        built.replace(path)
    finally:
        built.unlink(missing_ok=True)


def _write_text(
    file: BinaryIO, name: str, ids: np.ndarray, k: Rows, v: Rows, shape: TraceShape
) -> None:
    wanted = (shape.num_layers, len(ids), shape.num_kv_heads, shape.head_dim)
    for kind, x in (("k", k), ("v", v)):
        if x.shape != wanted:
            raise ValueError(
                f"Expected {kind} of text {name!r} to be {wanted}, got {x.shape}."
            )
        file.write(np.ascontiguousarray(x.astype(jnp.bfloat16)).view(np.uint8).data)
    file.write(ids.tobytes())


def _header(
    token_ids: Mapping[str, np.ndarray], shape: TraceShape, metadata: Mapping[str, str]
) -> bytes:
    """Spells the header, which says where each tensor lies before any is written."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, ids in token_ids.items():
        rows = [shape.num_layers, len(ids), shape.num_kv_heads, shape.head_dim]
        for kind, dtype, dims, itemsize in (
            ("k", "BF16", rows, 2),
            ("v", "BF16", rows, 2),
            ("tokens", "I32", [len(ids)], 4),
        ):
            end = offset + itemsize * int(np.prod(dims))
            header[f"{name}.{kind}"] = {
                "dtype": dtype,
                "shape": dims,
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
