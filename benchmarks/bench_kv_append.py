"""Device time of appending a batch of K and V rows to the pools."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import device_time_us
from pallas_kernels.dispatch import Implementation, targets_hopper
from pallas_kernels.kv_append import AppendPlan, kv_append, plan_append
from pallas_kernels.kv_append.cases import (
    BENCHMARK_CASES,
    CASES,
    AppendCase,
    AppendInputs,
    make_inputs,
)
from pallas_kernels.pages.layout import as_bits

COLD_BYTES = 200 << 20  # beyond the 60 MB of L2: the pools of each call are cold
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
    names: list[Implementation] = ["mosaic_gpu", "xla"] if targets_hopper() else ["xla"]
    rows = []
    for case in CASES[:2] if small else BENCHMARK_CASES:
        inputs = make_inputs(case, 0)
        plans = [make_plan(case, seed, inputs) for seed in range(NUM_PLANS)]
        rows.append(_plan_row(case, inputs))
        rows += [_append_row(case, inputs, plans, name) for name in names]
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
    _check(append, inputs, plans[0])
    donating = jax.jit(append, donate_argnums=(0, 1))
    num_pools = max(1, min(16, COLD_BYTES // (2 * inputs.k_pages.nbytes)))
    state = [jax.tree.map(jnp.copy, inputs[:2]) for _ in range(num_pools)]

    def call(index: int) -> Any:
        plan = plans[index % len(plans)]
        pools, which = state[index % num_pools], index % num_pools
        *state[which], statistics = donating(*pools, inputs.k, inputs.v, plan)
        return state[which], statistics

    num_calls = max(num_pools, len(plans))
    calls = [functools.partial(call, index) for index in range(num_calls)]
    microseconds = device_time_us(calls, repeats=24)
    num_real = int(np.sum(np.asarray(inputs.slot_mapping) >= 0))
    # K and V: 2 bytes read and the pool's written for each value
    width = 2 + inputs.k_pages.dtype.itemsize
    product = (num_real, case.num_kv_heads, case.head_dim, 2, width)
    num_bytes = int(np.prod(product, dtype=np.int64))
    return {
        "op": "kv_append" + " + statistics" * case.statistics,
        "case": case.name,
        "implementation": name,
        "device_us": microseconds,
        "bytes": num_bytes,
        "bytes_product": " x ".join(map(str, product)),
        "gb_per_s": num_bytes / microseconds / 1e3,
    }


def _check(append: Any, inputs: AppendInputs, plan: AppendPlan) -> None:
    """Compares with the reference: codes but for the sign of NaN, statistics wholly."""

    @jax.jit
    def differing(actual: Any, expected: Any) -> jax.Array:
        def fold(x: jax.Array) -> jax.Array:
            bits = as_bits(x)
            if bits.dtype != jnp.uint8:
                return bits
            return jnp.where(bits == 0xFF, jnp.uint8(0x7F), bits)

        pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        counts = [jnp.sum(fold(x) != fold(y), dtype=jnp.int32) for x, y in pairs]
        return jnp.sum(jnp.stack(counts))

    arguments = (*inputs[:4], plan)
    expected = append(*arguments, implementation="xla")
    count = int(differing(append(*arguments), expected))
    if count:
        raise AssertionError(f"{count} elements differ from the reference")
