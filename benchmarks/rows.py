"""What the benchmarks share: cold buffers, the check before timing, a result's row.

A benchmark is a module `bench_<name>` with `run(small)`, which yields rows: it lowers
all that it measures, then makes its first array after `turn.take()`. A row needs
`op`, `case`, `implementation` and a time, `device_us` or `wall_us`; with `gb_per_s` or
`tflop_per_s` it is compared to the ceiling, and with a row of the same case of the
"xla" implementation, or of the case `<case>-bf16`, to that baseline.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import turn
from benchmarks.timing import Times, device_times
from pallas_kernels.dispatch import Implementation, targets_hopper
from pallas_kernels.pages.layout import as_bits

# One op by implementation, lowered, or compiled and to be called; "differing" counts
# in how many elements two of its results differ.
type Programs = dict[str, Any]

COLD_BYTES = 200 << 20  # beyond the 60 MB of L2: the arrays of each call are cold

# Of attention: norm of the error over the norm of the output; see the op's tests.
TOLERANCE = 2.0**-8


def implementations() -> list[Implementation]:
    """Names those that run on this device, the kernel first."""
    return ["mosaic_gpu", "xla"] if targets_hopper() else ["xla"]


def lower_each(
    op: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> Programs:
    """Lowers an op for each implementation.

    Args:
      op: of the implementation's name, then of arrays and trees of them.
      *shapes: of the arrays.
      donate: which of them the caller gives up.
    """
    return {
        name: turn.lower(functools.partial(op, name), *shapes, donate=donate)
        for name in implementations()
    }


def lower_checked(
    op: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> Programs:
    """Lowers as `lower_each` does, and the comparison of two results for `check_equal`."""
    lowered = lower_each(op, *shapes, donate=donate)
    result = lowered["xla"].out_info
    return lowered | {"differing": turn.lower(_num_differing, result, result)}


def cold_copies[T](arrays: T) -> list[T]:
    """Copies arrays as often as it takes for one copy to leave the cache."""
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(arrays))
    num_copies = max(1, min(16, COLD_BYTES // num_bytes))
    return [jax.tree.map(jnp.copy, arrays) for _ in range(num_copies)]


def check_equal(
    actual: Any, expected: Any, differing: Callable[..., Any] | None = None
) -> None:
    """Compares results bit for bit, but for the sign of an FP8 NaN.

    Args:
      actual: a tree of arrays.
      expected: a tree of the same kind.
      differing: what compares them, compiled; it is compiled now if not given.

    Raises:
      AssertionError: with how many elements differ.
    """
    count = int((differing or _num_differing)(actual, expected))
    if count:
        raise AssertionError(f"{count} elements differ from the reference")


def relative_error(actual: Any, expected: Any) -> float:
    """Gives the norm of an error over the norm of what was expected, in float32."""
    got, want = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_error(error: float, name: str = "an error") -> None:
    """Holds an error of attention against what the kernels may have.

    Raises:
      AssertionError: with the error, if it is larger or NaN.
    """
    if not error <= TOLERANCE:
        raise AssertionError(f"Expected {name} within {TOLERANCE}, got {error}.")


@jax.jit
def _num_differing(actual: Any, expected: Any) -> jax.Array:
    def fold(x: jax.Array) -> jax.Array:
        bits = as_bits(x)
        if bits.dtype != jnp.uint8:
            return bits
        return jnp.where(bits == 0xFF, jnp.uint8(0x7F), bits)

    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    counts = [jnp.sum(fold(x) != fold(y), dtype=jnp.int32) for x, y in pairs]
    return jnp.sum(jnp.stack(counts))


def timed_row(
    op: str,
    case: str,
    implementation: Implementation,
    calls: Sequence[Callable[[], Any]],
    product: tuple[int, ...],
    *,
    repeats: int = 20,
) -> dict[str, Any]:
    """Times some calls.

    Args:
      op: what is timed.
      case: on which shapes.
      implementation: by which implementation.
      calls: taken in turn; see `device_time_us`.
      product: factors of the bytes that a call must move.
      repeats: how many calls are timed.
    """
    times = device_times(calls, repeats=repeats)
    row = {"op": op, "case": case, "implementation": implementation}
    return row | spread(times) | moved(product, times.median)


def spread(times: Times, clock: str = "device") -> dict[str, Any]:
    """The fields of a row that say how long a call took, in microseconds.

    Args:
      times: of one call.
      clock: "device" for the sum of its kernels, "wall" for what a caller waits.
    """
    return {
        f"{clock}_us": times.median,
        "p10_us": times.p10,
        "p90_us": times.p90,
        "samples": times.count,
    }


def moved(product: tuple[int, ...], microseconds: float) -> dict[str, Any]:
    """The fields of a row that say what a call must move, and how fast it did."""
    num_bytes = int(np.prod(product, dtype=np.int64))
    return {
        "bytes": num_bytes,
        "bytes_product": " x ".join(map(str, product)),
        "gb_per_s": num_bytes / microseconds / 1e3,
    }
