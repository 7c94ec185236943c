"""Device time of the masked amax per KV head."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import turn
from benchmarks.rows import check_equal, cold_copies, timed_row
from pallas_kernels.absmax import absmax
from pallas_kernels.absmax.cases import (
    BENCHMARK_CASES,
    CASES,
    AbsmaxCase,
    AbsmaxInputs,
    make_inputs,
)


def run(small: bool) -> Iterator[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Yields:
      One row per case.
    """
    cases = CASES[:2] if small else BENCHMARK_CASES
    made = [turn.make_on_host(make_inputs, case, 0) for case in cases]
    compiled = turn.compile_all([turn.lower(absmax, *inputs) for inputs in made])
    for case, inputs, step in zip(cases, made, compiled, strict=True):
        yield _row(case, inputs, step)


def _row(
    case: AbsmaxCase, inputs: AbsmaxInputs, step: Callable[..., Any]
) -> dict[str, Any]:
    x, real = jax.tree.map(jnp.asarray, inputs)
    size = np.abs(np.asarray(x, np.float32))[np.asarray(real)]
    want = np.max(np.where(np.isfinite(size), size, 0), axis=(0, 2))
    check_equal(step(x, real), jnp.asarray(want))
    calls = [functools.partial(step, copy, real) for copy in cold_copies(x)]
    product = (*x.shape, x.dtype.itemsize)
    return timed_row("absmax", case.name, "xla", calls, product)
