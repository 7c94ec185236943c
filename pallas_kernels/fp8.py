"""Facts of the FP8 format, and the one quantizer that kernels and references share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

FP8_DTYPE = jnp.float8_e4m3fn
# How a CPU holds FP8 pools: XLA has no FP8 data movement there and would pass over a
# whole pool, widened or viewed as integers, for every write into it.
CODES_DTYPE = jnp.uint8
FP8_MAX = 448.0
# 448 plus half a step of 32: a scale that was rounded to BF16 raises no false alarm.
SATURATED_ABOVE = 464.0
# Half of the smallest subnormal, 2^-9: what is not above it rounds to zero.
UNDERFLOWED_AT = 2.0**-10
# Smallest normal float32. What lies below counts as zero everywhere, because XLA
# flushes it on the CPU and not on the GPU.
TINY = 2.0**-126


class RowStatistics(NamedTuple):
    """What one batch of rows says about each KV head.

    `amax` is the largest finite `abs(x)` in units of x, 0 without any. Subnormal
    x counts as zero. The counts
    are of values, not of rows: `num_saturated` is finite with
    `abs(x * inv_scale) > 464`, `num_underflowed` nonzero with
    `abs(x * inv_scale) <= 2^-10`, `num_nonfinite` NaN or Inf.
    """

    amax: Float[Array, "num_kv_heads"]
    num_saturated: Int[Array, "num_kv_heads"]
    num_underflowed: Int[Array, "num_kv_heads"]
    num_nonfinite: Int[Array, "num_kv_heads"]


def saturating_cast(y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds float32 to E4M3, ties to even: NaN stays NaN, the rest clips to +-448.

    XLA turns an overflowing cast into NaN where the hardware saturates; clipping
    first makes both agree.
    """
    clipped = jnp.where(jnp.isnan(y), y, jnp.clip(y, -FP8_MAX, FP8_MAX))
    return clipped.astype(FP8_DTYPE)


def quantize_rows(
    x: Float[Array, "*rows num_kv_heads head_dim"],
    inv_scale: Float[Array, "num_kv_heads"],
) -> Float[Array, "*rows num_kv_heads head_dim"]:
    """Quantizes rows to E4M3 codes: `saturating_cast(float32(x) * inv_scale)`.

    Args:
      x: rows of keys or values, in units of the model's activations.
      inv_scale: reciprocal of the dequantization scale of each head, > 0.

    Returns:
      float8_e4m3fn codes.
    """
    per_row = inv_scale.reshape((1,) * (x.ndim - 2) + (-1, 1))
    return saturating_cast(x.astype(jnp.float32) * per_row)


def dequantize_rows(
    codes: Float[Array, "*rows num_kv_heads head_dim"],
    scale: Float[Array, "num_kv_heads"],
) -> Float[Array, "*rows num_kv_heads head_dim"]:
    """Widens E4M3 codes to float32: `float32(codes) * scale`.

    The barrier keeps XLA on the GPU from deleting a quantize-dequantize round trip
    inside one jit (`xla_allow_excess_precision`), which would undo the rounding.
    """
    per_row = scale.reshape((1,) * (codes.ndim - 2) + (-1, 1))
    return lax.optimization_barrier(codes).astype(jnp.float32) * per_row


def row_statistics(
    x: Float[Array, "num_tokens num_kv_heads head_dim"],
    inv_scale: Float[Array, "num_kv_heads"],
    real: Bool[Array, "num_tokens"],
) -> RowStatistics:
    """Computes amax and counters per KV head over the rows where `real` holds."""
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.abs(x) < TINY, 0.0, x)
    y = jnp.abs(x * inv_scale[None, :, None])
    counted = jnp.broadcast_to(real[:, None, None], x.shape)
    finite = jnp.isfinite(x) & counted

    def count(which: Bool[Array, "..."]) -> Int[Array, "num_kv_heads"]:
        return jnp.sum(which, axis=(0, 2), dtype=jnp.int32)

    return RowStatistics(
        amax=jnp.max(jnp.where(finite, jnp.abs(x), 0.0), axis=(0, 2), initial=0.0),
        num_saturated=count(finite & (y > SATURATED_ABOVE)),
        num_underflowed=count(finite & (x != 0) & (y <= UNDERFLOWED_AT)),
        num_nonfinite=count(~jnp.isfinite(x) & counted),
    )


def per_head(
    scale: float | Float[Array, "..."], num_kv_heads: int, *, name: str
) -> Float[Array, "num_kv_heads"]:
    """Broadcasts one scale, or one per KV head, to float32 `[num_kv_heads]`.

    Raises:
      ValueError: if the scale has another size.
    """
    scale = jnp.asarray(scale, jnp.float32)
    if scale.size not in (1, num_kv_heads) or scale.ndim > 1:
        raise ValueError(
            f"Expected {name} to be one value or one per KV head "
            f"({num_kv_heads=}), got shape {scale.shape}."
        )
    return jnp.broadcast_to(scale.reshape(-1), (num_kv_heads,))


def is_fp8(x: jax.Array) -> bool:
    """Says whether an array holds E4M3 codes, as such or as the bytes of them."""
    return x.dtype in (FP8_DTYPE, CODES_DTYPE)
