"""The definition of absmax in plain jnp, which XLA runs as fast as a kernel of ours.

Measured on an H200, 65,536 tokens of 8 heads: 39 us for XLA's one reduction, 41 us for
a Mosaic kernel of wide loads and its reduction of partials.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.fp8 import TINY
from pallas_kernels.pages.layout import Rows


def absmax(
    x: Rows, real: Bool[Array, "num_tokens"], *, per_head: bool
) -> Float[Array, "*num_kv_heads"]:
    """Reduces rows to their largest finite `abs(x)`; see `op.absmax`."""
    size = jnp.abs(x.astype(jnp.float32))
    counted = (size < jnp.inf) & real[:, None, None]  # False for NaN
    axes = (0, 2) if per_head else None
    amax = jnp.max(jnp.where(counted, size, 0.0), axis=axes, initial=0.0)
    # XLA's maximum takes subnormals for zero on a CPU but not on a GPU.
    return jnp.where(amax < TINY, 0.0, amax)
