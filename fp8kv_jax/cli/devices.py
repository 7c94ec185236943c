"""Spreads the model that a command runs over several devices."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh

from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.model import load
from fp8kv_jax.cli.options import ComputeDtype
from fp8kv_jax.parallel import Placement, place

if TYPE_CHECKING:
    from models.loading import LoadedModel


def load_on(
    num_devices: int, path: Path | None, dtype: ComputeDtype
) -> tuple["LoadedModel", Placement | None]:
    """Loads a model onto the first devices; onto one GPU, with joined projections.

    Returns:
      The model, its weights where they belong, and the placement; None for one device.

    Raises:
      UserError: as `load`, and if there are fewer devices, or the model does not
        divide evenly among them.
    """
    if num_devices == 1:
        return _fused_on_gpu(load(path, dtype)), None
    devices = jax.devices()
    if len(devices) < num_devices:
        raise UserError(
            f"Expected --tensor-parallel-size of at most {len(devices)}, the devices "
            f"that JAX sees, got {num_devices}."
        )
    from models.sharding import shard_params

    # Weights pass through the host's memory: one device may have no room for them.
    with _on_host():
        model = load(path, dtype)
    with checking_input():
        mesh = Mesh(np.array(devices[:num_devices]), ("tensor",))
        placement = place(mesh, model.config.num_kv_heads)
        params = shard_params(model.config, model.params, placement)
    return replace(model, params=params), placement


def _fused_on_gpu(model: "LoadedModel") -> "LoadedModel":
    """Joins projections where that is faster; a CPU gains nothing, and keeps its sums."""
    if jax.default_backend() != "gpu":
        return model
    from models.fusion import fuse_projections

    graphdef, params = fuse_projections(model.config, model.params)
    return replace(model, graphdef=graphdef, params=params)


def _on_host() -> contextlib.AbstractContextManager:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return contextlib.nullcontext()
