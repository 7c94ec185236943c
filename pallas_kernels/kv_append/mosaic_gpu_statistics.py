"""Statistics inside the append kernels: counted per value, merged by one reduction for K, one for V."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import fp8

# Three counts share an int32 while a register row is summed: 10 bits each, so that
# a row may hold up to 1023 values (256 is the most that a kernel sums).
_SATURATED = 1
_UNDERFLOWED = 1 << 10
_NONFINITE = 1 << 20
_COUNT_MASK = (1 << 10) - 1
NUM_COUNTS = 3


class Partials(NamedTuple):
    """Statistics of K and V by program; the counts in the order of RowStatistics."""

    amax: Float[Array, "2 num_kv_heads num_parts"]
    counts: Int[Array, "3 2 num_kv_heads num_parts"]


def partials_shape(
    num_parts: int, num_kv_heads: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Gives the output type of a kernel that emits partials."""
    shape = (2, num_kv_heads, num_parts)
    return (
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((NUM_COUNTS, *shape), jnp.int32),
    )


def value_statistics(
    x: Float[Array, "..."], y: Float[Array, "..."], counted: Bool[Array, "..."] | None
) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """Gives each value's part of the amax, and its counts packed into an int32.

    Args:
      x: values in float32.
      y: `x * inv_scale`.
      counted: which values take part; None for all.
    """
    size = jnp.abs(x)
    scaled = jnp.abs(y)
    finite = size < jnp.inf  # False for NaN
    underflowed = (scaled <= fp8.UNDERFLOWED_AT) & (size >= fp8.TINY)
    code = jnp.where(
        scaled > fp8.SATURATED_ABOVE,
        _SATURATED,
        jnp.where(underflowed, _UNDERFLOWED, 0),
    )
    code = jnp.where(finite, code, _NONFINITE)
    amax = jnp.where(finite, size, 0.0)
    if counted is None:
        return amax, code
    return jnp.where(counted, amax, 0.0), jnp.where(counted, code, 0)


def nothing_counts(
    smallest: Float[Array, ""], largest: Float[Array, ""], inv_scale: Float[Array, ""]
) -> Bool[Array, ""]:
    """Says whether the extremes of `abs(x)` rule out that any value counts.

    Products round monotonically, so they bound `abs(y)`. NaN and Inf fail the first
    comparison. A zero fails the second though it does not count: zeros are rare.
    """
    in_range = largest * inv_scale <= fp8.SATURATED_ABOVE
    return in_range & (smallest * inv_scale > fp8.UNDERFLOWED_AT)


def unpack_counts(packed: Int[Array, "..."]) -> tuple[Int[Array, "..."], ...]:
    """Splits packed sums into saturated, underflowed, non-finite."""
    return packed & _COUNT_MASK, (packed >> 10) & _COUNT_MASK, packed >> 20


def combine(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """Joins the statistics of two sets of values: amax first, then the counts."""
    return lax.max(a[0], b[0]), *(m + n for m, n in zip(a[1:], b[1:], strict=True))


def merge(
    partials: Sequence[Partials],
) -> tuple[fp8.RowStatistics, fp8.RowStatistics]:
    """Reduces the partials of all kernels of a call."""
    amax = jnp.concatenate([p.amax for p in partials], axis=2)
    # XLA's CPU takes subnormals for zero in a maximum; here they would survive.
    amax = jnp.where(amax < jnp.finfo(jnp.float32).tiny, 0.0, amax)
    counts = jnp.concatenate([p.counts for p in partials], axis=3)

    zero = jnp.int32(0)
    start = (jnp.float32(0), zero, zero, zero)

    def reduce(which: int) -> fp8.RowStatistics:
        leaves = (amax[which], *counts[:, which])
        return fp8.RowStatistics(*lax.reduce(leaves, start, combine, dimensions=(1,)))

    return reduce(0), reduce(1)
