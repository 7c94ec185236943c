"""Statistics inside the append kernels, and how those of programs are merged."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import fp8
from pallas_kernels.kv_append.reference import BothStatistics

# What an entry of a tally holds, an int16 read without its sign.
MOST_VALUES = 0xFFFF
_INT16 = jnp.int16
_MAGNITUDE = 0x7FFF
# Bits of bfloat16 magnitudes: those of Inf, and of the largest subnormal.
_INF = 0x7F80
_LARGEST_SUBNORMAL = 0x7F
# Added to magnitudes, it wraps those of Inf and NaN, and only those, to negative.
_WRAP = 0x8000 - _INF


class Totals(NamedTuple):
    """Amax and counts of some values: scalars."""

    amax: Array
    num_saturated: Array
    num_underflowed: Array
    num_nonfinite: Array

    def join(self, other: "Totals") -> "Totals":
        """Gives the totals of both sets of values."""
        counts = (m + n for m, n in zip(self[1:], other[1:], strict=True))
        return Totals(jnp.maximum(self.amax, other.amax), *counts)


def nothing() -> Totals:
    """Gives the totals of no values."""
    return Totals(jnp.float32(0), *(jnp.int32(0),) * 3)


class Limits(NamedTuple):
    """What one head's inverse scale means for bfloat16 magnitudes.

    Products round monotonically, so that a magnitude underflows up to `small` and
    saturates above `large`.
    """

    small: Float[Array, ""]
    large: Float[Array, ""]


def find_limits(inv_scale: Float[Array, ""]) -> Limits:
    """Finds the limits of one head; `small` is 0 if no normal magnitude underflows."""
    bounds = fp8.UNDERFLOWED_AT, fp8.SATURATED_ABOVE
    return Limits(*(_largest_within(bound, inv_scale) for bound in bounds))


def _largest_within(bound: float, inv_scale: Float[Array, ""]) -> Float[Array, ""]:
    """Finds the largest bfloat16 x with `float32(x) * inv_scale <= bound`."""
    most = float(jnp.finfo(jnp.bfloat16).max)
    guess = jnp.minimum(bound / inv_scale, most).astype(jnp.bfloat16)
    guess = guess.astype(jnp.float32)
    largest = jnp.bfloat16(0)
    # The guess and its neighbours: 2^-8 of it is half a step of bfloat16 or more.
    for factor in (1 - 1.25 * 2**-8, 1, 1 + 1.25 * 2**-8):
        x = (guess * factor).astype(jnp.bfloat16)
        fits = x.astype(jnp.float32) * inv_scale <= bound
        largest = jnp.where(fits & (x < jnp.inf), x, largest)
    return largest


class Tally(NamedTuple):
    """Counts of bfloat16 values while they are taken in, without crossing lanes.

    Two neighbours share a register as int16 bits, and a step costs half as many
    instructions as values. `largest` is the largest finite magnitude plus _WRAP; the
    others, unsigned, are how many magnitudes are above zero and the subnormals, above
    the two limits, and not finite.
    """

    largest: Int[Array, "rows columns"]
    num_normal: Int[Array, "rows columns"]
    num_above_small: Int[Array, "rows columns"]
    num_above_large: Int[Array, "rows columns"]
    num_nonfinite: Int[Array, "rows columns"]

    def totals(self) -> Totals:
        """Reduces to scalars."""
        size = lax.bitcast_convert_type(self.largest - _INT16(_WRAP), jnp.bfloat16)
        normal, above_small, above_large, nonfinite = (
            jnp.sum(jnp.sum(n.astype(jnp.int32) & MOST_VALUES, axis=1))
            for n in self[1:]
        )
        return Totals(
            jnp.max(jnp.max(size.astype(jnp.float32), axis=1)),
            above_large - nonfinite,
            normal - above_small,
            nonfinite,
        )


class Counter:
    """Takes bfloat16 values into a tally of one shape and register layout.

    Each entry of the tally holds up to MOST_VALUES.
    """

    def __init__(self, shape: tuple[int, int], limits: Limits, layout: Any = None):
        """Prepares what all values are compared with.

        Args:
          shape: of the tally; what is counted is as large or a multiple of it.
          limits: of the head.
          layout: of the tally; None outside kernels.
        """
        self._shape = shape

        def full(value: Any, dtype: Any = _INT16) -> jax.Array:
            x = jnp.full(shape, value, dtype)
            # All other layouts follow from these.
            return x if layout is None else plgpu.layout_cast(x, layout)

        def bits(limit: jax.Array) -> jax.Array:
            # What is below the normal numbers is none of ours.
            x = lax.bitcast_convert_type(full(limit, jnp.bfloat16), _INT16)
            return jnp.maximum(x, _INT16(_LARGEST_SUBNORMAL))

        bounds = (
            full(_LARGEST_SUBNORMAL),
            bits(limits.small),
            bits(limits.large),
            full(_INF - 1),
        )
        # Negated, because pairs of int16 can be added in one step but not subtracted;
        # the barrier keeps LLVM from making a subtraction of it.
        self._negated = tuple(lax.optimization_barrier(_INT16(0) - x) for x in bounds)
        self.nothing = Tally(full(_WRAP), *(full(0) for _ in bounds))

    def count(
        self,
        tally: Tally,
        x: Float[Array, "rows columns"],
        real: Bool[Array, "rows"] | None = None,
    ) -> Tally:
        """Adds values to a tally: those of the rows where `real` holds."""
        size = lax.bitcast_convert_type(x, _INT16)
        if real is None:
            size = size & _INT16(_MAGNITUDE)
        else:
            # The others become zeros, which no count has.
            mask = jnp.where(real, _INT16(_MAGNITUDE), _INT16(0))
            size = size & lax.broadcast_in_dim(mask, x.shape, [0])
        rows, columns = self._shape
        for row in range(0, x.shape[0], rows):
            for column in range(0, x.shape[1], columns):
                part = size[row : row + rows, column : column + columns]
                tally = self._add(tally, part)
        return tally

    def _add(self, tally: Tally, size: Int[Array, "rows columns"]) -> Tally:
        zero, one = _INT16(0), _INT16(1)
        # Add, min and max are one instruction on Hopper.
        counts = (
            n + jnp.maximum(jnp.minimum(size + negated, one), zero)
            for n, negated in zip(tally[1:], self._negated, strict=True)
        )
        return Tally(jnp.maximum(tally.largest, size + _INT16(_WRAP)), *counts)


def both_shape(*shape: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Gives the output type of a kernel that emits statistics of K, then of V."""
    amax = jax.ShapeDtypeStruct(shape, jnp.float32)
    count = jax.ShapeDtypeStruct(shape, jnp.int32)
    return 2 * (amax, count, count, count)


def both(flat: Sequence[Array]) -> BothStatistics:
    """Groups the outputs of a kernel of that type."""
    return fp8.RowStatistics(*flat[:4]), fp8.RowStatistics(*flat[4:])


def store(refs: Sequence[Any], index: tuple[Any, ...], totals: Totals) -> None:
    """Stores scalars to the four refs of one side."""
    # XLA's CPU takes subnormals for zero in a maximum; here they would survive.
    amax = jnp.where(totals.amax < fp8.TINY, 0.0, totals.amax)
    for ref, value in zip(refs, (amax, *totals[1:]), strict=True):
        ref[index] = value


def merge(
    partials: Sequence[Shaped[Array, "num_kv_heads num_parts"]],
) -> BothStatistics:
    """Merges what the programs of each head emitted, in one kernel of XLA."""

    def join(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
        pairs = list(zip(a, b, strict=True))
        return [
            jnp.maximum(*x) if i % 4 == 0 else x[0] + x[1] for i, x in enumerate(pairs)
        ]

    zeros = [jnp.zeros((), x.dtype) for x in partials]
    return both(lax.reduce(list(partials), zeros, join, (1,)))
