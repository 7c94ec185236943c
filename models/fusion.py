"""One product where a layer has several of the same input: for decoding on a GPU."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.transformer import abstract_model

# Of each block of a layer: what becomes one projection, in the order of its columns.
_FUSED = {
    "attention": ("qkv", ("q", "k", "v")),
    "mlp": ("gate_up", ("gate", "up")),
}


def fuse_projections(
    config: ModelConfig, params: dict[str, Any]
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Joins each layer's q, k and v projections, and its gate and up, into one each.

    A decode step multiplies few rows and is bound by reading the weights, which one
    large product does at more of the memory's bandwidth than several smaller ones.
    The results are equal up to the order of the products' sums.

    Args:
      config: the model's.
      params: of a model that is not fused. Its layers are taken out one by one, so
        that the memory never holds more than one of them twice.

    Returns:
      The graph definition for `bind_forward`, and the parameters.
    """
    graphdef, abstract = abstract_model(config, params["embedding"].dtype, fused=True)
    layers = params["layers"]
    fused_layers = {index: _fuse_layer(layers.pop(index)) for index in sorted(layers)}
    fused = params | {"layers": fused_layers}
    # In the order of the abstract parameters, whose tree the graph definition knows.
    return graphdef, jax.tree.map(lambda _, array: array, abstract, fused)


def _fuse_layer(layer: dict[str, Any]) -> dict[str, Any]:
    fused = dict(layer)
    for block, (name, parts) in _FUSED.items():
        projections = [layer[block][part] for part in parts]
        kept = {key: x for key, x in layer[block].items() if key not in parts}
        joined = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *projections)
        fused[block] = kept | {name: joined}
    return fused


def split_projections(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Takes apart on the host what `fuse_projections` joined, to hash or to compare.

    Args:
      config: the model's.
      params: of a fused model, or of one that is not.

    Returns:
      The parameters by their names before; of joined ones, views of numpy arrays.
    """
    q_size, kv_size = (
        heads * config.head_dim for heads in (config.num_q_heads, config.num_kv_heads)
    )
    ends: dict[str, tuple[int, ...]] = {
        "qkv": (0, q_size, q_size + kv_size, q_size + 2 * kv_size),
        "gate_up": (0, config.intermediate_size, 2 * config.intermediate_size),
    }
    layers = {i: _split_layer(layer, ends) for i, layer in params["layers"].items()}
    return params | {"layers": layers}


def _split_layer(
    layer: dict[str, Any], ends: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    split = dict(layer)
    for block, (name, parts) in _FUSED.items():
        if name in layer[block]:
            kept = {key: x for key, x in layer[block].items() if key != name}
            joined = jax.tree.map(np.asarray, layer[block][name])
            for part, (start, end) in zip(
                parts, itertools.pairwise(ends[name]), strict=True
            ):
                kept[part] = {key: x[..., start:end] for key, x in joined.items()}
            split[block] = kept
    return split
