"""Device time of decode attention over FP8 and BF16 pools, against the bytes it reads."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import device_time_us
from pallas_kernels.dispatch import Implementation, targets_hopper
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import BENCHMARK_CASES, Case, make_inputs

COLD_BYTES = 200 << 20  # beyond the 60 MB of L2: the pools of each call are cold
# Norm of the error over the norm of the output; derived in the op's tests.
TOLERANCE = 2.0**-8


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: two small cases, for a machine without a GPU.

    Returns:
      One row per case and implementation.
    """
    cases = _small_cases() if small else BENCHMARK_CASES
    names: list[Implementation] = ["mosaic_gpu", "xla"] if targets_hopper() else ["xla"]
    return [_row(label, case, name) for label, case in cases.items() for name in names]


def _small_cases() -> dict[str, Case]:
    case = BENCHMARK_CASES["8x2048"]
    case = dataclasses.replace(case, seq_lens=(256,) * 2)
    return {
        "2x256": case,
        "2x256-bf16": dataclasses.replace(case, pool_dtype=jnp.bfloat16),
    }


def _row(label: str, case: Case, name: Implementation) -> dict[str, Any]:
    (q, k_pages, v_pages, *rest), arrays = make_inputs(case, 0)
    attend = functools.partial(
        paged_attention, implementation=name, **arrays, **case.options
    )
    error = _error(attend, (q, k_pages, v_pages, *rest))
    num_pools = max(1, min(16, COLD_BYTES // (2 * k_pages.nbytes)))
    pools = [(k_pages, v_pages)]
    pools += [(jnp.copy(k_pages), jnp.copy(v_pages)) for _ in range(num_pools - 1)]
    calls = [functools.partial(attend, q, *pair, *rest) for pair in pools]
    microseconds = device_time_us(calls, repeats=20 if name == "mosaic_gpu" else 4)
    product = (_tokens_read(case), case.num_kv_heads, case.head_dim, 2)
    num_bytes = math.prod(product) * k_pages.dtype.itemsize
    return {
        "op": "paged_attention",
        "case": label,
        "implementation": name,
        "device_us": microseconds,
        "bytes": num_bytes,
        # Tokens, KV heads, elements, K and V, bytes of an element.
        "bytes_product": " x ".join(map(str, (*product, k_pages.dtype.itemsize))),
        "gb_per_s": num_bytes / microseconds / 1e3,
        "relative_error": error,
    }


def _tokens_read(case: Case) -> int:
    window = case.sliding_window or max(case.seq_lens)
    return sum(min(n, window + case.num_queries - 1) for n in case.seq_lens)


def _error(attend: Any, args: tuple[jax.Array, ...]) -> float:
    want = np.asarray(attend(*args, implementation="xla"), np.float32)
    got = np.asarray(attend(*args), np.float32)
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error <= TOLERANCE:
        raise AssertionError(f"Expected an error within {TOLERANCE}, got {error}.")
    return error
