"""Device time of appending a batch of K and V rows to the pools."""

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


def run(small: bool) -> Iterator[dict[str, Any]]:
    """Checks each case against the reference, then times it.

    The plan is made outside: a step makes it once for all layers; its own time is a
    row of its own.

    Args:
      small: a few small cases, for a machine without a GPU.

    Yields:
      One row per case and implementation.
    """
    cases = CASES[:2] if small else BENCHMARK_CASES
    made = [turn.make_on_host(make_inputs, case, 0) for case in cases]
    compiled = turn.compile_all(list(map(_lower, cases, made)))
    for case, inputs, (plan, appends) in zip(cases, made, compiled, strict=True):
        inputs = jax.tree.map(jnp.asarray, inputs)
        yield _plan_row(case, inputs, plan)
        plans = [
            plan(_moved_slots(case, seed, inputs.slot_mapping))
            for seed in range(NUM_PLANS)
        ]
        for name in implementations():
            yield _append_row(case, inputs, plans, name, appends)


def _lower(case: AppendCase, inputs: AppendInputs) -> tuple[Any, Programs]:
    """Lowers the plan, and the append over pools that are donated."""
    *arrays, slots, k_inv_scale, v_inv_scale = inputs
    plan = functools.partial(
        plan_append, num_pages=case.num_pages, page_size=case.page_size
    )
    arrays += jax.eval_shape(plan, slots), (k_inv_scale, v_inv_scale)

    def append(name, k_pages, v_pages, k, v, plan, inv_scales):
        return kv_append(
            k_pages,
            v_pages,
            k,
            v,
            plan,
            k_inv_scale=inv_scales[0],
            v_inv_scale=inv_scales[1],
            statistics=case.statistics,
            implementation=name,
        )

    return turn.lower(plan, slots), lower_checked(append, *arrays, donate=(0, 1))


def _moved_slots(case: AppendCase, seed: int, slot_mapping: jax.Array) -> jax.Array:
    """Draws the case's kind of slots at another place, so that pages are cold."""
    rng = np.random.default_rng(seed)
    slots = np.asarray(slot_mapping)
    page, offset = np.divmod(slots, case.page_size)
    moved = rng.permutation(case.num_pages)[page] * case.page_size + offset
    return jnp.asarray(np.where(slots < 0, slots, moved), jnp.int32)


def _plan_row(
    case: AppendCase, inputs: AppendInputs, plan: Callable[..., Any]
) -> dict[str, Any]:
    microseconds = device_time_us([lambda: plan(inputs.slot_mapping)])
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
    appends: Programs,
) -> dict[str, Any]:
    inv_scales = inputs.k_inv_scale, inputs.v_inv_scale

    def append(by: str, pools: Any, plan: AppendPlan) -> Any:
        return appends[by](*pools, inputs.k, inputs.v, plan, inv_scales)

    fresh = [jax.tree.map(jnp.copy, inputs[:2]) for _ in range(2)]
    actual, expected = (
        append(by, pools, plans[0])
        for by, pools in zip((name, "xla"), fresh, strict=True)
    )
    check_equal(actual, expected, appends["differing"])
    del actual, expected
    state = cold_copies(inputs[:2])
    num_pools = len(state)

    def call(index: int) -> Any:
        plan = plans[index % len(plans)]
        pools, which = state[index % num_pools], index % num_pools
        *state[which], statistics = append(name, pools, plan)
        return state[which], statistics

    num_calls = max(num_pools, len(plans))
    calls = [functools.partial(call, index) for index in range(num_calls)]
    num_real = int(np.sum(np.asarray(inputs.slot_mapping) >= 0))
    # K and V: 2 bytes read and the pool's written for each value
    width = 2 + inputs.k_pages.dtype.itemsize
    product = (num_real, case.num_kv_heads, case.head_dim, 2, width)
    op = "kv_append" + " + statistics" * case.statistics
    return timed_row(op, case.name, name, calls, product, repeats=24)
