"""Device time of decode attention over FP8 and BF16 pools, against the bytes it reads."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import turn
from benchmarks.rows import (
    Programs,
    check_error,
    cold_copies,
    implementations,
    lower_each,
    relative_error,
    timed_row,
)
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import BENCHMARK_CASES, Case, make_inputs


def run(small: bool) -> Iterator[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: two small cases, for a machine without a GPU.

    Yields:
      One row per case and implementation.
    """
    cases = _small_cases() if small else BENCHMARK_CASES
    compiled = turn.compile_all({label: _lower(case) for label, case in cases.items()})
    for label, case in cases.items():
        for name in implementations():
            yield _row(label, case, name, *compiled[label])


def _small_cases() -> dict[str, Case]:
    case = BENCHMARK_CASES["8x2048"]
    case = dataclasses.replace(case, seq_lens=(256,) * 2)
    return {
        "2x256": case,
        "2x256-bf16": dataclasses.replace(case, pool_dtype=jnp.bfloat16),
    }


def _lower(case: Case) -> tuple[Programs, Programs]:
    """Lowers the op for the case's queries, and for the same in float32."""
    (q, *rest), scales = jax.eval_shape(lambda: make_inputs(case, 0))

    def attend(name, scales, *arrays):
        return paged_attention(*arrays, **scales, **case.options, implementation=name)

    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return (
        lower_each(attend, scales, q, *rest),
        lower_each(attend, scales, wide, *rest),
    )


def _row(
    label: str, case: Case, name: Implementation, programs: Programs, wide: Programs
) -> dict[str, Any]:
    (q, k_pages, v_pages, *rest), scales = make_inputs(case, 0)
    attend = functools.partial(programs[name], scales)
    errors = _errors(name, programs, wide, (scales, q, k_pages, v_pages, *rest))
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


def _errors(
    name: Implementation, programs: Programs, wide: Programs, args: tuple[Any, ...]
) -> dict[str, float]:
    """Compares with float32 attention on the dequantized values.

    Once as the timed call returns it, and once by a call with the same queries in
    float32, whose outputs are float32 too: the kernel's own error, without that of
    rounding the output to BF16, which any kernel has.
    """
    scales, q, *rest = args
    wide_args = scales, q.astype(jnp.float32), *rest
    want = np.asarray(wide["xla"](*wide_args))
    errors = {"relative_error": relative_error(programs[name](*args), want)}
    if name != "xla":
        got = wide[name](*wide_args)
        errors["relative_error_float32_output"] = relative_error(got, want)
    for error_name, error in errors.items():
        check_error(error, error_name)
    return errors
