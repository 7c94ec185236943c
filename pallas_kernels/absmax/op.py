"""absmax: the largest finite magnitude per KV head, or of all."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.absmax import reference
from pallas_kernels.pages.layout import Rows


@functools.partial(jax.jit, static_argnames=("per_head",))
def absmax(
    x: Rows,
    real: Bool[Array, "num_tokens"] | None = None,
    *,
    per_head: bool = True,
) -> Float[Array, "*num_kv_heads"]:
    """Computes the largest finite `abs(x)` over the real tokens of a batch.

    Equivalent to `max(abs(x[real]))` over tokens and columns, without NaN and Inf;
    equal to the last bit on every device. Zero where nothing is left, and
    where nothing reaches the smallest normal float32.

    Args:
      x: rows of keys or values, bfloat16 or float32, in units of the model's
        activations.
      real: which tokens take part; None for all.
      per_head: one value for each KV head, or one for all.

    Returns:
      float32, one per KV head, or a scalar.

    Raises:
      ValueError: if shapes or dtypes disagree.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.absmax import absmax
      >>> x = jnp.array([[[1.0, -3.0]], [[9.0, jnp.inf]]])
      >>> absmax(x, jnp.array([True, False])).tolist()
      [3.0]
    """
    if x.ndim != 3 or x.size == 0:
        raise ValueError(
            "Expected x to be [num_tokens, num_kv_heads, head_dim] and not empty, got "
            f"shape {x.shape}."
        )
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"Expected x to be bfloat16 or float32, got {x.dtype}.")
    if real is None:
        real = jnp.ones(x.shape[0], bool)
    if real.shape != x.shape[:1] or real.dtype != jnp.bool_:
        raise ValueError(
            f"Expected real to be bool of shape {x.shape[:1]}, the num_tokens of x, "
            f"got {real.dtype} of shape {real.shape}."
        )
    return reference.absmax(x, real, per_head=per_head)
