"""Device time of the masked amax per KV head."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.rows import check_equal, cold_copies, timed_row
from pallas_kernels.absmax import absmax
from pallas_kernels.absmax.cases import (
    BENCHMARK_CASES,
    CASES,
    AbsmaxCase,
    make_inputs,
)


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per case.
    """
    cases = CASES[:2] if small else BENCHMARK_CASES
    return [_row(case) for case in cases]


def _row(case: AbsmaxCase) -> dict[str, Any]:
    x, real = make_inputs(case, 0)
    size = np.abs(np.asarray(x, np.float32))[np.asarray(real)]
    want = np.max(np.where(np.isfinite(size), size, 0), axis=(0, 2))
    check_equal(absmax(x, real), jnp.asarray(want))
    calls = [functools.partial(absmax, copy, real) for copy in cold_copies(x)]
    product = (*x.shape, x.dtype.itemsize)
    return timed_row("absmax", case.name, "xla", calls, product)
