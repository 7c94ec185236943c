"""Exact counters that do not wrap: 64 bits as two uint32 limbs, since x64 may be off."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

type Counter = UInt32[Array, "*shape 2"]


def zeros(*shape: int) -> Counter:
    """Makes counters at zero; the last axis holds the high and the low limb."""
    return jnp.zeros((*shape, 2), jnp.uint32)


def add(counter: Counter, amount: Int[Array, "*shape"]) -> Counter:
    """Adds 32 bits, not negative, to each counter, carrying into the high limb."""
    high, low = counter[..., 0], counter[..., 1]
    new_low = low + amount.astype(jnp.uint32)
    carry = (new_low < low).astype(jnp.uint32)
    return jnp.stack([high + carry, new_low], axis=-1)


def merge(a: Counter, b: Counter) -> Counter:
    """Adds two counters; associative and commutative."""
    new = add(a, b[..., 1])
    return new.at[..., 0].add(b[..., 0])


def total(counter: Counter) -> np.ndarray:
    """Reads counters on the host as int64."""
    limbs = np.asarray(counter).astype(np.int64)
    return (limbs[..., 0] << 32) + limbs[..., 1]
