"""Device time of requantization: staged rows into their slots, and codes to codes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.rows import check_equal, cold_copies, implementations, timed_row
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kv_requantize import (
    plan_requantize,
    requantize_pages,
    requantize_staged,
)
from pallas_kernels.kv_requantize.cases import (
    CASES,
    SMALL_CASES,
    RequantizeCase,
    make_inputs,
)

TIMED = {
    "llama3.1_8b_page128_prefill",
    "llama3.1_8b_page128_mixed",
    "llama3.1_8b_ragged_256",
    "llama3.1_8b_ragged_4096",
    "llama3.1_8b_decode",
    "llama3.1_8b_copied",
    "smollm2_135m_page128_prefill",
    "gemma3_270m_page128_prefill",
}
POOL_BYTES = 512 << 20  # of the pool that `requantize_pages` streams


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per op, case and implementation.
    """
    cases = SMALL_CASES[:2] if small else [c for c in CASES if c.name in TIMED]
    rows = [_staged_row(case, name) for case in cases for name in _kernels()]
    for case in cases:
        if case.ownership == "prefill":
            case = case if small else _with_large_pools(case)
            rows += [_pages_row(case, name) for name in _kernels()]
    return rows


def _kernels() -> list[Implementation]:
    # On a GPU the fallback's loop over pages runs on the host: no baseline at all.
    return implementations()[:1]


def _with_large_pools(case: RequantizeCase) -> RequantizeCase:
    page_bytes = 2 * case.num_kv_heads * case.page_size * case.head_dim
    return dataclasses.replace(case, num_pages=POOL_BYTES // page_bytes)


def _staged_row(case: RequantizeCase, name: Implementation) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    plan = plan_requantize(inputs.slot_owner, page_size=case.page_size)
    rest = (*inputs[2:5], plan)
    scales = {"k_inv_scale": inputs.k_inv_scale, "v_inv_scale": inputs.v_inv_scale}

    def step(k_pages, v_pages, rest, scales, *, implementation):
        return requantize_staged(
            k_pages, v_pages, *rest, **scales, implementation=implementation
        )

    owned = int(np.sum(np.asarray(inputs.slot_owner) >= 0))
    return _row(
        "requantize_staged",
        case,
        name,
        functools.partial(step, rest=rest, scales=scales),
        inputs[:2],
        # K and V; 2 bytes of a row are read, 1 byte of a code is written
        (owned, case.num_kv_heads, case.head_dim, 2, 2 + 1),
    )


def _pages_row(case: RequantizeCase, name: Implementation) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    names = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale")
    scales = {name: getattr(inputs, name) for name in names}
    sizes = (case.num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    return _row(
        "requantize_pages",
        case,
        name,
        functools.partial(requantize_pages, **scales),
        inputs[:2],
        (*sizes, 2, 1 + 1),  # K and V, read and written
    )


def _row(
    op: str,
    case: RequantizeCase,
    name: Implementation,
    step: Callable[..., Any],
    pools: tuple[jax.Array, jax.Array],
    product: tuple[int, ...],
) -> dict[str, Any]:
    actual = step(*pools, implementation=name)
    check_equal(actual, step(*pools, implementation="xla"))
    donating = jax.jit(
        functools.partial(step, implementation=name), donate_argnums=(0, 1)
    )
    state = cold_copies(pools)

    def call(index: int) -> Any:
        state[index] = donating(*state[index])
        return state[index]

    calls = [functools.partial(call, index) for index in range(len(state))]
    return timed_row(op, case.name, name, calls, product)
