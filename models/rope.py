"""Rotary position embedding: which frequencies, and how they turn q and k."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Divides every frequency by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Slows down the low frequencies only, as Llama 3.1 and later do.

    A frequency that turns more than `high_freq_factor` times within
    `original_max_context` stays, one that turns less than `low_freq_factor` times is
    divided by `factor`, and between the two the divisor is blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyDivisors:
    """Divides each frequency by its own number, as the `rope_freqs` of a GGUF do."""

    divisors: tuple[float, ...]


type RopeScaling = LinearScaling | Llama3Scaling | FrequencyDivisors


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotary embedding of one layer."""

    base: float
    scaling: RopeScaling | None = None


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Computes radians per position for each pair, as float32 `[head_dim / 2]`."""
    frequencies = rope.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.scaling:
        case LinearScaling(factor=factor):
            frequencies = frequencies / factor
        case FrequencyDivisors(divisors=divisors):
            frequencies = frequencies / np.asarray(divisors, np.float64)
        case Llama3Scaling() as scaling:
            frequencies = _scale_llama3(frequencies, scaling)
    return frequencies.astype(np.float32)


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_max_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rotation(
    positions: Int32[Array, "num_seqs num_queries"],
    frequencies: np.ndarray,
) -> tuple[
    Float32[Array, "num_seqs num_queries 1 pairs"],
    Float32[Array, "num_seqs num_queries 1 pairs"],
]:
    """Computes the cosine and sine of each pair at each position, in float32."""
    radians = (
        positions.astype(jnp.float32)[:, :, None, None]
        * jnp.asarray(frequencies)[None, None, None, :]
    )
    return jnp.cos(radians), jnp.sin(radians)


def rotate(
    x: Float[Array, "num_seqs num_queries num_heads head_dim"],
    cos: Float32[Array, "num_seqs num_queries 1 pairs"],
    sin: Float32[Array, "num_seqs num_queries 1 pairs"],
) -> Float[Array, "num_seqs num_queries num_heads head_dim"]:
    """Turns pair i, the elements i and i + head_dim / 2 of a head; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return turned.astype(x.dtype)


def rotations(
    ropes: tuple[Rope, ...], head_dim: int, positions: jax.Array
) -> dict[Rope, tuple[jax.Array, jax.Array]]:
    """Computes one rotation per distinct rope, so that layers share it."""
    return {
        rope: rotation(positions, inverse_frequencies(rope, head_dim))
        for rope in dict.fromkeys(ropes)
    }
