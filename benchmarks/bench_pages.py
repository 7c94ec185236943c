"""Device time of page copies and of gathering sequences to dense rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import device_time_us
from pallas_kernels.dispatch import Implementation, targets_hopper
from pallas_kernels.pages import copy_pages, gather_sequences
from pallas_kernels.pages.cases import CASES, SMALL_CASES, PagesCase, make_inputs
from pallas_kernels.pages.layout import as_bits

COLD_BYTES = 200 << 20  # beyond the 60 MB of L2: the pools of each call are cold


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per op, case and implementation.
    """
    cases = SMALL_CASES[:2] if small else CASES
    names: list[Implementation] = ["mosaic_gpu", "xla"] if targets_hopper() else ["xla"]
    return [
        measure(case, name)
        for case in cases
        for measure in (_copy_row, _gather_row)
        for name in names
    ]


def _copy_row(case: PagesCase, name: Implementation) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    lists = (inputs.sources, inputs.destinations)
    _check(copy_pages, name, (*inputs[:2], *lists))
    donating = jax.jit(
        functools.partial(copy_pages, implementation=name), donate_argnums=(0, 1)
    )
    state = _copies(inputs[:2])

    def call(index: int) -> Any:
        state[index] = donating(*state[index], *lists)
        return state[index]

    calls = [functools.partial(call, index) for index in range(len(state))]
    live = int(np.sum((np.asarray(lists[0]) >= 0) & (np.asarray(lists[1]) >= 0)))
    # K and V, read and written
    product = (live, *_page(case), 2, 2)
    return _row("copy_pages", case, name, calls, product)


def _gather_row(case: PagesCase, name: Implementation) -> dict[str, Any]:
    inputs = make_inputs(case, 0)
    table = inputs.block_table
    _check(gather_sequences, name, (*inputs[:2], table))
    gather = functools.partial(gather_sequences, implementation=name)
    calls = [functools.partial(gather, *pools, table) for pools in _copies(inputs[:2])]
    product = (case.num_seqs, case.pages_per_seq, *_page(case), 2, 2)
    return _row("gather_sequences", case, name, calls, product)


def _page(case: PagesCase) -> tuple[int, ...]:
    return case.num_kv_heads, case.page_size, case.head_dim, case.dtype.itemsize


def _copies(pools: tuple[jax.Array, ...]) -> list[tuple[jax.Array, ...]]:
    num_pools = max(1, min(16, COLD_BYTES // (2 * pools[0].nbytes)))
    return [jax.tree.map(jnp.copy, pools) for _ in range(num_pools)]


def _row(
    op: str,
    case: PagesCase,
    name: Implementation,
    calls: list[Callable[[], Any]],
    product: tuple[int, ...],
) -> dict[str, Any]:
    microseconds = device_time_us(calls, repeats=20)
    num_bytes = int(np.prod(product, dtype=np.int64))
    return {
        "op": op,
        "case": case.name,
        "implementation": name,
        "device_us": microseconds,
        "bytes": num_bytes,
        "bytes_product": " x ".join(map(str, product)),
        "gb_per_s": num_bytes / microseconds / 1e3,
    }


def _check(op: Callable[..., Any], name: Implementation, arrays: Any) -> None:
    @jax.jit
    def differing(actual, expected):
        def fold(x):
            bits = as_bits(x)
            if bits.dtype != jnp.uint8:
                return bits
            return jnp.where(bits == 0xFF, jnp.uint8(0x7F), bits)

        pairs = zip(actual, expected, strict=True)
        return sum(jnp.sum(fold(x) != fold(y), dtype=jnp.int32) for x, y in pairs)

    actual = op(*arrays, implementation=name)
    count = int(differing(actual, op(*arrays, implementation="xla")))
    if count:
        raise AssertionError(f"{name}: {count} elements differ from the reference")
