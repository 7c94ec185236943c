"""Device time of decode attention over FP8 and BF16 pools, against the bytes it reads."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import cold_copies, implementations, timed_row
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import BENCHMARK_CASES, Case, make_inputs

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
    return [
        _row(label, case, name)
        for label, case in cases.items()
        for name in implementations()
    ]


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
    errors = _errors(attend, (q, k_pages, v_pages, *rest))
    pools = cold_copies((k_pages, v_pages))
    calls = [functools.partial(attend, q, *pair, *rest) for pair in pools]
    # Tokens, KV heads, elements, K and V, bytes of an element.
    itemsize = k_pages.dtype.itemsize
    product = (_tokens_read(case), case.num_kv_heads, case.head_dim, 2, itemsize)
    repeats = 20 if name == "mosaic_gpu" else 4
    row = timed_row("paged_attention", label, name, calls, product, repeats=repeats)
    return row | errors


def _tokens_read(case: Case) -> int:
    window = case.sliding_window or max(case.seq_lens)
    return sum(min(n, window + case.num_queries - 1) for n in case.seq_lens)


def _errors(attend: Any, args: tuple[jax.Array, ...]) -> dict[str, float]:
    """Compares with float32 attention on the dequantized values.

    Once as the timed call returns it, and once by a call with the same queries in
    float32, whose outputs are float32 too: the kernel's own error, without that of
    rounding the output to BF16, which any kernel has.
    """
    q, *rest = args
    wide = q.astype(jnp.float32)
    want = np.asarray(attend(wide, *rest, implementation="xla"))
    errors = {
        "relative_error": _relative_error(attend(q, *rest), want),
        "relative_error_float32_output": _relative_error(attend(wide, *rest), want),
    }
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise AssertionError(f"Expected {name} within {TOLERANCE}, got {error}.")
    return errors


def _relative_error(got: jax.Array, want: np.ndarray) -> float:
    difference = np.asarray(got, np.float32) - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want))
