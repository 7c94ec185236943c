"""Device time of chunked prefill over paged pools, against cuDNN on contiguous BF16."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import implementations
from benchmarks.timing import device_time_us
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.prefill_cases import PREFILL_BENCHMARK_CASES

# Norm of the error over the norm of the output; derived in the op's tests.
TOLERANCE = 2.0**-8


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it, and cuDNN beside it.

    Args:
      small: one small case, for a machine without a GPU.

    Returns:
      One row per case and implementation.
    """
    cases = PREFILL_BENCHMARK_CASES
    if small:
        case = dataclasses.replace(cases["2048+0"], num_queries=64, seq_lens=(192,))
        return [_row("64+128", case, "xla")]
    rows = []
    for label, case in cases.items():
        if "mosaic_gpu" in implementations():
            kernel = _row(label, case, "mosaic_gpu")
            baselines = _cudnn_rows(label, case)
            fastest = min(row["device_us"] for row in baselines)
            kernel["ratio_to_cudnn"] = kernel["device_us"] / fastest
            rows += [kernel, *baselines]
    return rows


def _row(label: str, case: Case, name: Any) -> dict[str, Any]:
    args, arrays = make_inputs(case, 0)
    attend = functools.partial(paged_attention, **arrays, **case.options)
    want = np.asarray(attend(*args, implementation="xla"), np.float32)
    got = np.asarray(attend(*args, implementation=name), np.float32)
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error <= TOLERANCE:
        raise AssertionError(f"Expected an error within {TOLERANCE}, got {error}.")
    attend = functools.partial(attend, *args, implementation=name)
    row = _timed(label, name, [attend], _flops(case))
    return row | {"relative_error": error}


def _cudnn_rows(label: str, case: Case) -> list[dict[str, Any]]:
    """Times cuDNN on BF16 queries, keys and values of the case's shapes.

    Its causal mask starts at the first key. Behind a prefix the same result takes a
    mask of its own, which is slow. So two bounds on cuDNN's best are timed beside it:
    all keys without a mask, and the prefix without and the chunk with one, unmerged.
    """
    prefix = case.seq_lens[0] - case.num_queries
    shape = (1, case.seq_lens[0], case.num_kv_heads, case.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
    shape = (1, case.num_queries, case.num_q_heads, case.head_dim)
    q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    causal = jax.jit(functools.partial(attend, is_causal=True))
    plain = jax.jit(attend)
    if not prefix:
        return [_timed(label, "cudnn", [lambda: causal(q, k, v)], _flops(case))]
    chunk = (q, k[:, prefix:], v[:, prefix:])
    before = (q, k[:, :prefix], v[:, :prefix])
    position = prefix + jnp.arange(case.num_queries, dtype=jnp.int32)
    token = jnp.arange(case.seq_lens[0], dtype=jnp.int32)
    mask = (token[None, :] <= position[:, None])[None, None]
    masked = jax.jit(functools.partial(attend, mask=mask))
    calls: dict[str, Callable[[], Any]] = {
        "cudnn mask": lambda: masked(q, k, v),
        "cudnn unmasked": lambda: plain(q, k, v),
        "cudnn in two parts": lambda: (plain(*before), causal(*chunk)),
    }
    return [_timed(label, name, [f], _flops(case)) for name, f in calls.items()]


def _flops(case: Case) -> int:
    """Counts multiplications and additions of both products, over what is seen."""
    queries, prefix = case.num_queries, case.seq_lens[0] - case.num_queries
    seen = queries * prefix + queries * (queries + 1) // 2
    return 4 * case.num_q_heads * case.head_dim * seen


def _timed(
    label: str, name: str, calls: list[Callable[[], Any]], flops: int
) -> dict[str, Any]:
    microseconds = device_time_us(calls, repeats=20 if name != "xla" else 4)
    return {
        "op": "paged_prefill",
        "case": label,
        "implementation": name,
        "device_us": microseconds,
        "flops": flops,
        "tflop_per_s": flops / microseconds / 1e6,
    }
