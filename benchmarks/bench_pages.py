"""Device time of page copies and of gathering sequences to dense rows."""

import functools
from collections.abc import Iterator
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
from pallas_kernels.dispatch import Implementation
from pallas_kernels.pages import copy_pages, gather_sequences
from pallas_kernels.pages.cases import CASES, SMALL_CASES, PagesCase, make_inputs


def run(small: bool) -> Iterator[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Yields:
      One row per op, case and implementation.
    """
    cases = SMALL_CASES[:2] if small else CASES
    compiled = turn.compile_all([_lower(case) for case in cases])
    for case, (copying, gathering) in zip(cases, compiled, strict=True):
        for name in implementations():
            yield _copy_row(case, name, copying)
            yield _gather_row(case, name, gathering)


def _lower(case: PagesCase) -> tuple[Programs, Programs]:
    shapes = jax.eval_shape(lambda: make_inputs(case, 0))
    *pools, sources, destinations, table = shapes

    def copy(name: Implementation, *arrays: jax.Array) -> Any:
        return copy_pages(*arrays, implementation=name)

    def gather(name: Implementation, *arrays: jax.Array) -> Any:
        return gather_sequences(*arrays, implementation=name)

    return (
        lower_checked(copy, *pools, sources, destinations, donate=(0, 1)),
        lower_checked(gather, *pools, table),
    )


def _copy_row(
    case: PagesCase, name: Implementation, programs: Programs
) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    lists = (inputs.sources, inputs.destinations)
    state = cold_copies(inputs[:2])
    reference = programs["xla"](*jax.tree.map(jnp.copy, inputs[:2]), *lists)
    actual = programs[name](*inputs[:2], *lists)
    check_equal(actual, reference, programs["differing"])

    def call(index: int) -> Any:
        state[index] = programs[name](*state[index], *lists)
        return state[index]

    calls = [functools.partial(call, index) for index in range(len(state))]
    live = int(np.sum((np.asarray(lists[0]) >= 0) & (np.asarray(lists[1]) >= 0)))
    # K and V, read and written
    product = (live, *_page(case), 2, 2)
    return timed_row("copy_pages", case.name, name, calls, product)


def _gather_row(
    case: PagesCase, name: Implementation, programs: Programs
) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    table = inputs.block_table
    arrays = (*inputs[:2], table)
    actual, expected = programs[name](*arrays), programs["xla"](*arrays)
    check_equal(actual, expected, programs["differing"])
    calls = [
        functools.partial(programs[name], *pools, table)
        for pools in cold_copies(inputs[:2])
    ]
    product = (case.num_seqs, case.pages_per_seq, *_page(case), 2, 2)
    return timed_row("gather_sequences", case.name, name, calls, product)


def _page(case: PagesCase) -> tuple[int, ...]:
    return case.num_kv_heads, case.page_size, case.head_dim, case.dtype.itemsize
