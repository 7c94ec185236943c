"""Where a decoder's weights lie on a mesh: heads, inner size and vocabulary split."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fp8kv_jax.parallel import KV_HEADS, QUERIES, Placement, put_array
from models.config import ModelConfig

_TENSOR = (KV_HEADS, QUERIES)
_COLUMNS, _ROWS = PartitionSpec(None, _TENSOR), PartitionSpec(_TENSOR, None)
# The columns of k and v are whole KV heads, which devices along QUERIES hold alike.
_SPECS = {
    "embedding": _ROWS,
    "head": _ROWS,
    "attention/q/kernel": _COLUMNS,
    "attention/k/kernel": PartitionSpec(None, KV_HEADS),
    "attention/v/kernel": PartitionSpec(None, KV_HEADS),
    "attention/q/bias": PartitionSpec(_TENSOR),
    "attention/k/bias": PartitionSpec(KV_HEADS),
    "attention/v/bias": PartitionSpec(KV_HEADS),
    "attention/out/kernel": _ROWS,
    "mlp/gate/kernel": _COLUMNS,
    "mlp/up/kernel": _COLUMNS,
    "mlp/down/kernel": _ROWS,
}


def shard_params(
    config: ModelConfig, params: dict[str, Any], placement: Placement
) -> dict[str, Any]:
    """Copies a decoder's parameters to where `param_shardings` says they lie."""
    shardings = param_shardings(config, params, placement)
    return jax.tree.map(put_array, params, shardings)


def param_shardings(
    config: ModelConfig, params: dict[str, Any], placement: Placement
) -> dict[str, Any]:
    """Says where each parameter lies, so that a layer needs two sums over devices.

    Projections out of the residual are split by columns (whole heads), those back
    into it by rows; the embedding and the head by words. XLA puts the sums in.

    Args:
      config: the model's.
      params: parameters, or their shapes; not fused, since a device's columns of a
        fused projection are not the ones it computes with.
      placement: from `fp8kv_jax.place`, with the model's number of KV heads.

    Returns:
      The same tree with a sharding for each parameter.

    Raises:
      ValueError: if the parameters are fused, or a size does not divide evenly.
    """
    if "qkv" in params["layers"][0]["attention"]:
        raise ValueError(
            "Expected parameters that are not fused: each device needs its own heads' "
            "columns of q, k and v side by side."
        )
    sizes = {
        "num_q_heads": config.num_q_heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % placement.num_tensor:
            raise ValueError(
                f"Expected {name}={size} to be a multiple of the "
                f"{placement.num_tensor} devices that share the weights."
            )

    def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
        names = [entry.key for entry in path if isinstance(entry.key, str)]
        spec = _SPECS.get("/".join(names).removeprefix("layers/"), PartitionSpec())
        if names[0] in ("embedding", "head") and x.shape[0] % placement.num_tensor:
            spec = PartitionSpec()  # an odd number of words: whole everywhere
        return placement.sharding(*spec)

    return jax.tree.map_with_path(sharding, params)
