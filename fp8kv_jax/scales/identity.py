"""Which model some scales were made for: hashes of its parts, and where two differ."""

import dataclasses
import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fp8kv_jax.scales.fields import (
    Checked,
    Name,
    Positive,
    Sha256,
    canonical_json,
)


class DescribesModel(Protocol):
    """What a model's configuration, a dataclass, must name."""

    @property
    def architecture(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity(Checked):
    """A model, by what its scales depend on.

    Attributes:
      architecture: name of the family.
      num_layers, num_kv_heads, head_dim: shape of the cache.
      config_sha256: see `hash_config`.
      weights_sha256: see `fingerprint_weights`.
      tokenizer_sha256: hash of the tokenizer's canonical JSON; None without one.
      chat_template_sha256: hash of the template's text; None without one.
    """

    architecture: Name
    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive
    config_sha256: Sha256
    weights_sha256: Sha256
    tokenizer_sha256: Sha256 | None
    chat_template_sha256: Sha256 | None

    def differences(self, other: "ModelIdentity") -> dict[str, tuple[str, str]]:
        """What differs between two models: part -> (this one's, the other's)."""
        parts = {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        }
        return {
            _PARTS.get(name, name): (_short(mine), _short(theirs))
            for name, (mine, theirs) in parts.items()
            if mine != theirs
        }


_PARTS = {
    "config_sha256": "config",
    "weights_sha256": "weights",
    "tokenizer_sha256": "tokenizer",
    "chat_template_sha256": "chat template",
}


def _short(value: str | int | None) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 else text


def identify_model(
    config: DescribesModel,
    params: Any,
    *,
    tokenizer: str | None,
    chat_template: str | None,
    ignored_fields: Collection[str] = ("bos_id", "eos_ids"),
) -> ModelIdentity:
    """Hashes a model's parts.

    Args:
      config: its configuration, a dataclass.
      params: its parameters, nested dicts of arrays.
      tokenizer: its tokenizer as canonical JSON, or None.
      chat_template: the template's source, or None.
      ignored_fields: fields of the configuration to leave out; by default those that
        are copied from the tokenizer.

    Raises:
      ValueError: as `fingerprint_weights` does.
    """
    return ModelIdentity(
        architecture=config.architecture,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        config_sha256=hash_config(config, ignored_fields=ignored_fields),
        weights_sha256=fingerprint_weights(params),
        tokenizer_sha256=hash_text(tokenizer),
        chat_template_sha256=hash_text(chat_template),
    )


def hash_text(text: str | None) -> str | None:
    """sha256 of a text in UTF-8; None of None."""
    return None if text is None else _sha256(text.encode("utf-8", "surrogatepass"))


def hash_config(config: Any, *, ignored_fields: Collection[str] = ()) -> str:
    """sha256 of a dataclass as canonical JSON.

    A field at its default is left out: a later version may add a field whose default
    means "as before", and old hashes stay valid. Nested dataclasses carry the name
    of their type, since two kinds of rotary scaling may have the same fields.

    Args:
      config: the dataclass; its values are what JSON can hold, or dataclasses.
      ignored_fields: fields to leave out at the top.
    """
    described = _describe(config)
    kept = {name: x for name, x in described.items() if name not in ignored_fields}
    return _sha256(canonical_json(kept).encode())


def _describe(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    described: dict[str, Any] = {"type": type(value).__name__}
    for field in dataclasses.fields(value):
        if getattr(value, field.name) != field.default:
            described[field.name] = _describe(getattr(value, field.name))
    return described


def fingerprint_weights(params: Any) -> str:
    """sha256 over the name, the shape and the bytes of every tensor, in BF16.

    Floating-point tensors are rounded to bfloat16 on the host first, to nearest even,
    so that a model loaded as float32 and as bfloat16 from one file gives one
    fingerprint, wherever its parameters live. The price: a change too small to show
    in any bfloat16 weight goes unseen. Other tensors are taken as they are. Values
    count, not files: quantized files of one model differ.

    Args:
      params: nested dicts of arrays, sharded over the devices in any way; every
        process needs to hold all of each tensor.

    Raises:
      ValueError: if there is no tensor, or a part of one is on other hosts alone.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    if not leaves:
        raise ValueError("Expected params to hold tensors, got none.")
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }
    with ThreadPoolExecutor(max_workers=2) as pool:  # hashing runs beside rounding
        names = sorted(named)
        leaves = [named[name] for name in names]
        digests = list(pool.map(_describe_tensor, names, leaves))
    return _sha256(canonical_json(digests).encode())


def _describe_tensor(name: str, leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    ):
        raise ValueError(
            f"Expected this process to hold all of tensor {name!r}, got a part of it: "
            "gather the weights, or take their fingerprint where they are whole."
        )
    values = np.asarray(leaf)
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = values.astype(jnp.bfloat16, copy=False)
    # Little-endian on disk and in every hash.
    little = values.dtype.newbyteorder("<")
    values = np.ascontiguousarray(values).astype(little, copy=False)
    data = values.reshape(-1).view(np.uint8)
    return [name, list(leaf.shape), values.dtype.name, hashlib.sha256(data).hexdigest()]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
