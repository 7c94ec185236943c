"""Lowering for an H200 on a machine without one: catches most mistakes of a kernel."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H200 = AbstractDevice("NVIDIA H200", None, "gpu")


def lower_for_h200(f: Callable[..., Any], *shapes: Any, **kwshapes: Any) -> str:
    """Lowers `f` for one H200, its Mosaic kernels included.

    Args:
      f: a function of arrays, jitted or not.
      *shapes: arrays, or `jax.ShapeDtypeStruct` trees in their place.
      **kwshapes: the same for keyword arguments.

    Returns:
      The text of the lowered module.
    """
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(f).trace(*shapes, **kwshapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
