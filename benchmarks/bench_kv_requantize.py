"""Device time of requantization: staged rows into their slots, and codes to codes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import turn
from benchmarks.rows import (
    Programs,
    check_equal,
    cold_copies,
    implementations,
    lower_checked,
    timed_row,
)
from pallas_kernels.kv_requantize import (
    plan_requantize,
    requantize_pages,
    requantize_staged,
)
from pallas_kernels.kv_requantize.cases import (
    CASES,
    SMALL_CASES,
    RequantizeCase,
    RequantizeInputs,
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


def run(small: bool) -> Iterator[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Yields:
      One row per op and case.
    """
    cases = SMALL_CASES[:2] if small else [c for c in CASES if c.name in TIMED]
    streamed = [case for case in cases if case.ownership == "prefill"]
    if not small:
        streamed = [_with_large_pools(case) for case in streamed]
    staged, pages = turn.compile_all(
        ([_lower_staged(case) for case in cases], [_lower_pages(c) for c in streamed])
    )
    for case, (plan, programs) in zip(cases, staged, strict=True):
        yield _staged_row(case, plan, programs)
    for case, programs in zip(streamed, pages, strict=True):
        yield _pages_row(case, programs)


def _with_large_pools(case: RequantizeCase) -> RequantizeCase:
    page_bytes = 2 * case.num_kv_heads * case.page_size * case.head_dim
    return dataclasses.replace(case, num_pages=POOL_BYTES // page_bytes)


def _lower_staged(case: RequantizeCase) -> tuple[Any, Programs]:
    shapes = jax.eval_shape(lambda: make_inputs(case, 0))
    plan = functools.partial(plan_requantize, page_size=case.page_size)
    planned = jax.eval_shape(plan, shapes.slot_owner)
    rest = _staged_arguments(shapes, planned)
    return turn.lower(plan, shapes.slot_owner), _lower(
        requantize_staged, shapes[:2], *rest
    )


def _lower_pages(case: RequantizeCase) -> Programs:
    shapes = jax.eval_shape(lambda: make_inputs(case, 0))
    return _lower(requantize_pages, shapes[:2], *_pages_arguments(shapes))


def _lower(op: Callable[..., Any], pools: Any, rest: Any, scales: Any) -> Programs:
    def step(name, k_pages, v_pages, rest, scales):
        return op(k_pages, v_pages, *rest, **scales, implementation=name)

    return lower_checked(step, *pools, rest, scales, donate=(0, 1))


def _staged_arguments(inputs: RequantizeInputs, plan: Any) -> tuple[Any, Any]:
    scales = {"k_inv_scale": inputs.k_inv_scale, "v_inv_scale": inputs.v_inv_scale}
    return (*inputs[2:5], plan), scales


def _pages_arguments(inputs: RequantizeInputs) -> tuple[Any, Any]:
    names = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale")
    return (), {name: getattr(inputs, name) for name in names}


def _staged_row(
    case: RequantizeCase, plan: Callable[..., Any], programs: Programs
) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    arguments = _staged_arguments(inputs, plan(inputs.slot_owner))
    owned = int(np.sum(np.asarray(inputs.slot_owner) >= 0))
    # K and V; 2 bytes of a row are read, 1 byte of a code is written
    product = (owned, case.num_kv_heads, case.head_dim, 2, 2 + 1)
    return _row("requantize_staged", case, programs, inputs[:2], arguments, product)


def _pages_row(case: RequantizeCase, programs: Programs) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    sizes = (case.num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    product = (*sizes, 2, 1 + 1)  # K and V, read and written
    arguments = _pages_arguments(inputs)
    return _row("requantize_pages", case, programs, inputs[:2], arguments, product)


def _row(
    op: str,
    case: RequantizeCase,
    programs: Programs,
    pools: tuple[jax.Array, jax.Array],
    arguments: tuple[Any, Any],
    product: tuple[int, ...],
) -> dict[str, Any]:
    # On a GPU the fallback's loop over pages runs on the host: no baseline at all.
    name = implementations()[0]
    state = cold_copies(pools)
    expected = programs["xla"](*jax.tree.map(jnp.copy, pools), *arguments)
    actual = programs[name](*pools, *arguments)
    check_equal(actual, expected, programs["differing"])
    del pools, actual, expected

    def call(index: int) -> Any:
        state[index] = programs[name](*state[index], *arguments)
        return state[index]

    calls = [functools.partial(call, index) for index in range(len(state))]
    return timed_row(op, case.name, name, calls, product)
