"""Device time of page copies and of gathering sequences to dense rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.rows import check_equal, cold_copies, implementations, timed_row
from pallas_kernels.dispatch import Implementation
from pallas_kernels.pages import copy_pages, gather_sequences
from pallas_kernels.pages.cases import CASES, SMALL_CASES, PagesCase, make_inputs


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per op, case and implementation.
    """
    cases = SMALL_CASES[:2] if small else CASES
    return [
        measure(case, name)
        for case in cases
        for measure in (_copy_row, _gather_row)
        for name in implementations()
    ]


def _copy_row(case: PagesCase, name: Implementation) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    lists = (inputs.sources, inputs.destinations)
    _check(copy_pages, name, (*inputs[:2], *lists))
    donating = jax.jit(
        functools.partial(copy_pages, implementation=name), donate_argnums=(0, 1)
    )
    state = cold_copies(inputs[:2])

    def call(index: int) -> Any:
        state[index] = donating(*state[index], *lists)
        return state[index]

    calls = [functools.partial(call, index) for index in range(len(state))]
    live = int(np.sum((np.asarray(lists[0]) >= 0) & (np.asarray(lists[1]) >= 0)))
    # K and V, read and written
    product = (live, *_page(case), 2, 2)
    return timed_row("copy_pages", case.name, name, calls, product)


def _gather_row(case: PagesCase, name: Implementation) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    table = inputs.block_table
    _check(gather_sequences, name, (*inputs[:2], table))
    gather = functools.partial(gather_sequences, implementation=name)
    calls = [
        functools.partial(gather, *pools, table) for pools in cold_copies(inputs[:2])
    ]
    product = (case.num_seqs, case.pages_per_seq, *_page(case), 2, 2)
    return timed_row("gather_sequences", case.name, name, calls, product)


def _page(case: PagesCase) -> tuple[int, ...]:
    return case.num_kv_heads, case.page_size, case.head_dim, case.dtype.itemsize


def _check(op: Callable[..., Any], name: Implementation, arrays: Any) -> None:
    actual = op(*arrays, implementation=name)
    check_equal(actual, op(*arrays, implementation="xla"))
