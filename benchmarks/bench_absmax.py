"""Device time of the masked amax per KV head."""

import functools
from typing import Any

from benchmarks.rows import check_equal, cold_copies, implementations, timed_row
from pallas_kernels.absmax import absmax
from pallas_kernels.absmax.cases import (
    BENCHMARK_CASES,
    CASES,
    AbsmaxCase,
    make_inputs,
)
from pallas_kernels.dispatch import Implementation


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per case and implementation.
    """
    cases = CASES[:2] if small else BENCHMARK_CASES
    return [_row(case, name) for case in cases for name in implementations()]


def _row(case: AbsmaxCase, name: Implementation) -> dict[str, Any]:
    x, real = make_inputs(case, 0)
    reduce = functools.partial(absmax, implementation=name)
    check_equal(reduce(x, real), absmax(x, real, implementation="xla"))
    calls = [functools.partial(reduce, copy, real) for copy in cold_copies(x)]
    product = (*x.shape, x.dtype.itemsize)
    return timed_row("absmax", case.name, name, calls, product)
