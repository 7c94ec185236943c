"""One product where a layer has several of the same input: for decoding on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
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
      params: of a model that is not fused. Drop them: the joined matrices are copies.

    Returns:
      The graph definition for `bind_forward`, and the parameters.
    """
    graphdef, abstract = abstract_model(config, params["embedding"].dtype, fused=True)
    layers = {index: _fuse_layer(layer) for index, layer in params["layers"].items()}
    fused = params | {"layers": layers}
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
