"""The definition of absmax in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.pages.layout import Rows


def absmax(
    x: Rows, real: Bool[Array, "num_tokens"], *, per_head: bool
) -> Float[Array, "*num_kv_heads"]:
    """Reduces rows to their largest finite `abs(x)`; see `op.absmax`."""
    size = jnp.abs(x.astype(jnp.float32))
    counted = (size < jnp.inf) & real[:, None, None]  # False for NaN
    axes = (0, 2) if per_head else None
    return flush(jnp.max(jnp.where(counted, size, 0.0), axis=axes, initial=0.0))


def flush(amax: Float[Array, "..."]) -> Float[Array, "..."]:
    """Takes subnormals for zero, as XLA's maximum does on a CPU but not on a GPU."""
    return jnp.where(amax < jnp.finfo(jnp.float32).tiny, 0.0, amax)
