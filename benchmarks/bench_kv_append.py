"""Device time of appending a batch of K and V rows to the pools."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import check_equal, cold_copies, implementations, timed_row
from benchmarks.timing import device_time_us
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kv_append import AppendPlan, kv_append, plan_append
from pallas_kernels.kv_append.cases import (
    BENCHMARK_CASES,
    CASES,
    AppendCase,
    AppendInputs,
    make_inputs,
)

NUM_PLANS = 8


def run(small: bool) -> list[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    The plan is made outside: a step makes it once for all layers; its own time is a
    row of its own.

    Args:
      small: a few small cases, for a machine without a GPU.

    Returns:
      one row per case and implementation.
    """
    rows = []
    for case in CASES[:2] if small else BENCHMARK_CASES:
        inputs = make_inputs(case, 0)
        plans = [make_plan(case, seed, inputs) for seed in range(NUM_PLANS)]
        rows.append(_plan_row(case, inputs))
        rows += [_append_row(case, inputs, plans, name) for name in implementations()]
    return rows


def make_plan(case: AppendCase, seed: int, inputs: AppendInputs) -> AppendPlan:
    """Plans the case's kind of slots at another place, so that pages are cold."""
    rng = np.random.default_rng(seed)
    slots = np.asarray(inputs.slot_mapping)
    page, offset = np.divmod(slots, case.page_size)
    moved = rng.permutation(case.num_pages)[page] * case.page_size + offset
    slots = jnp.asarray(np.where(slots < 0, slots, moved), jnp.int32)
    return _plan(case, slots)


def _plan(case: AppendCase, slots: jax.Array) -> AppendPlan:
    return plan_append(slots, num_pages=case.num_pages, page_size=case.page_size)


def _plan_row(case: AppendCase, inputs: AppendInputs) -> dict[str, Any]:
    microseconds = device_time_us([lambda: _plan(case, inputs.slot_mapping)])
    return {
        "op": "plan_append",
        "case": case.name,
        "implementation": "xla",
        "device_us": microseconds,
    }


def _append_row(
    case: AppendCase,
    inputs: AppendInputs,
    plans: list[AppendPlan],
    name: Implementation,
) -> dict[str, Any]:
    append = functools.partial(
        kv_append,
        k_inv_scale=inputs.k_inv_scale,
        v_inv_scale=inputs.v_inv_scale,
        statistics=case.statistics,
        implementation=name,
    )
    arguments = (*inputs[:4], plans[0])
    check_equal(append(*arguments), append(*arguments, implementation="xla"))
    donating = jax.jit(append, donate_argnums=(0, 1))
    state = cold_copies(inputs[:2])
    num_pools = len(state)

    def call(index: int) -> Any:
        plan = plans[index % len(plans)]
        pools, which = state[index % num_pools], index % num_pools
        *state[which], statistics = donating(*pools, inputs.k, inputs.v, plan)
        return state[which], statistics

    num_calls = max(num_pools, len(plans))
    calls = [functools.partial(call, index) for index in range(num_calls)]
    num_real = int(np.sum(np.asarray(inputs.slot_mapping) >= 0))
    # K and V: 2 bytes read and the pool's written for each value
    width = 2 + inputs.k_pages.dtype.itemsize
    product = (num_real, case.num_kv_heads, case.head_dim, 2, width)
    op = "kv_append" + " + statistics" * case.statistics
    return timed_row(op, case.name, name, calls, product, repeats=24)
