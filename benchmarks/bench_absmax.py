"""Device time of the masked amax per KV head."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.timing import device_time_us
from pallas_kernels.absmax import absmax
from pallas_kernels.absmax.cases import (
    BENCHMARK_CASES,
    CASES,
    AbsmaxCase,
    make_inputs,
)
from pallas_kernels.dispatch import Implementation, targets_hopper

COLD_BYTES = 200 << 20  # beyond the 60 MB of L2: the rows of each call are cold


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per case and implementation.
    """
    names: list[Implementation] = ["mosaic_gpu", "xla"] if targets_hopper() else ["xla"]
    cases = CASES[:2] if small else BENCHMARK_CASES
    return [_row(case, name) for case in cases for name in names]


def _row(case: AbsmaxCase, name: Implementation) -> dict[str, Any]:
    x, real = make_inputs(case, 0)
    reduce = functools.partial(absmax, implementation=name)
    expected = absmax(x, real, implementation="xla")
    np.testing.assert_array_equal(reduce(x, real), expected)
    copies = max(1, min(16, COLD_BYTES // x.nbytes))
    calls = [functools.partial(reduce, jnp.copy(x), real) for _ in range(copies)]
    microseconds = device_time_us(calls)
    product = (*x.shape, x.dtype.itemsize)
    num_bytes = int(np.prod(product, dtype=np.int64))
    return {
        "op": "absmax",
        "case": case.name,
        "implementation": name,
        "device_us": microseconds,
        "bytes": num_bytes,
        "bytes_product": " x ".join(map(str, product)),
        "gb_per_s": num_bytes / microseconds / 1e3,
    }
