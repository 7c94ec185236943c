"""The ops of a step on each device's own heads and pages, under `jax.shard_map`.

Each function takes a placement first. Without one it is the op of its name; with one,
what belongs to a stretch of the data axis has a leading axis for it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from fp8kv_jax.batch import Batch
from fp8kv_jax.parallel import (
    BY_DATA,
    BY_HEAD,
    DATA,
    KV_HEADS,
    POOL,
    QUERIES,
    QUERY_ROWS,
    REPLICATED,
    ROWS,
    STAGED_ROWS,
    Placement,
)
from fp8kv_jax.staging import StagedWindow
from pallas_kernels.fp8 import RowStatistics
from pallas_kernels.kv_append import AppendPlan
from pallas_kernels.kv_append import kv_append as _kv_append
from pallas_kernels.kv_append import plan_append as _plan_append
from pallas_kernels.kv_requantize import RequantizePlan
from pallas_kernels.kv_requantize import plan_requantize as _plan_requantize
from pallas_kernels.kv_requantize import requantize_pages as _requantize_pages
from pallas_kernels.kv_requantize import requantize_staged as _requantize_staged
from pallas_kernels.kv_requantize.plan import NO_RUN
from pallas_kernels.paged_attention import paged_attention as _paged_attention
from pallas_kernels.pages import copy_pages as _copy_pages

type Pools = tuple[Array, Array]
type Statistics = tuple[RowStatistics, RowStatistics]


def plan_append(
    placement: Placement | None,
    slots: Int32[Array, "num_tokens"],
    *,
    num_pages: int,
    page_size: int,
) -> AppendPlan:
    """Plans the writes of each stretch of pages; see `kv_append.plan_append`."""
    if placement is None:
        return _plan_append(slots, num_pages=num_pages, page_size=page_size)
    own_pages = num_pages // placement.num_data

    def plan(slots: Array) -> AppendPlan:
        own_slots = own_pages * page_size
        local = slots - lax.axis_index(DATA) * own_slots
        # Another stretch's slot is nobody's here: past the pool, so that it counts as
        # dropped.
        local = jnp.where(local < 0, own_slots, local)
        local = jnp.where(slots < 0, slots, local)
        return _stacked(_plan_append(local, num_pages=own_pages, page_size=page_size))

    return _on_devices(placement, plan, (BY_DATA,), BY_DATA)(slots)


def kv_append(
    placement: Placement | None,
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    plan: AppendPlan,
    inv_scales: dict[str, Float[Array, "groups"]],
    **options: Any,
) -> tuple[Array, Array, tuple[RowStatistics, RowStatistics] | None]:
    """Appends each device's own heads; statistics are `[num_data, num_kv_heads]`."""
    if placement is None:
        return _kv_append(k_pages, v_pages, k, v, plan, **inv_scales, **options)

    def append(k_pages, v_pages, k, v, plan, inv_scales):
        *pools, statistics = _kv_append(
            k_pages, v_pages, k, v, _own(plan), **inv_scales, **options
        )
        return *pools, _stacked(statistics)

    by_group = jax.tree.map(_spec_of_groups, inv_scales)
    in_specs = (POOL, POOL, ROWS, ROWS, BY_DATA, by_group)
    out_specs = (POOL, POOL, ROWS)
    append = _on_devices(placement, append, in_specs, out_specs)
    return append(k_pages, v_pages, k, v, plan, inv_scales)


def paged_attention(
    placement: Placement | None,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    part: Batch,
    scales: dict[str, Float[Array, "num_kv_heads"]],
    **options: Any,
) -> Array:
    """Attends from each device's query heads to its KV heads."""

    def attend(q, k_pages, v_pages, table, seq_lens, query_starts, scales):
        options_and_scales = options | scales | {"query_starts": query_starts}
        return _paged_attention(
            q, k_pages, v_pages, table, seq_lens, **options_and_scales
        )

    where = part.block_table, part.seq_lens, part.query_starts
    if placement is None:
        return attend(q, k_pages, v_pages, *where, scales)
    _check_queries(placement, q.shape[2], k_pages.shape[1])

    def attend_own(q, k_pages, v_pages, table, *rest):
        if placement.num_data > 1:
            table = _own_pages(table, k_pages.shape[0])
        return attend(q, k_pages, v_pages, table, *rest)

    in_specs = (QUERY_ROWS, POOL, POOL, *(BY_DATA,) * 3, BY_HEAD)
    attend_own = _on_devices(placement, attend_own, in_specs, QUERY_ROWS)
    return attend_own(q, k_pages, v_pages, *where, scales)


def _check_queries(placement: Placement, num_q_heads: int, num_kv_heads: int) -> None:
    sharers = placement.mesh.shape[QUERIES]
    own_kv_heads = num_kv_heads // placement.num_kv_splits
    group = num_q_heads // num_kv_heads
    if sharers > 1 and (group % sharers or own_kv_heads > 1):
        raise ValueError(
            f"Expected the {group} query heads of a KV head to be a multiple of "
            f"{sharers}, the devices that share each of {num_kv_heads} KV heads: use "
            "fewer devices."
        )


def copy_pages(
    placement: Placement | None,
    k_pages: Array,
    v_pages: Array,
    copies: Int32[Array, "num_copies 2"],
    **options: Any,
) -> Pools:
    """Copies pages within each stretch of them."""

    def copy(k_pages, v_pages, copies):
        if placement is not None and placement.num_data > 1:
            own = copies - lax.axis_index(DATA) * k_pages.shape[0]
            here = (own >= 0) & (own < k_pages.shape[0]) & (copies >= 0)
            copies = jnp.where(jnp.all(here, axis=1, keepdims=True), own, -1)
        return _copy_pages(k_pages, v_pages, copies[:, 0], copies[:, 1], **options)

    in_specs = (POOL, POOL, REPLICATED)
    copy = _on_devices(placement, copy, in_specs, (POOL, POOL))
    return copy(k_pages, v_pages, copies)


def possible_copies(
    placement: Placement | None,
    copies: Int32[Array, "num_copies 2"],
    num_pages: int,
) -> Int32[Array, "num_copies 2"]:
    """Drops copies from one stretch of pages to another, which nobody can do."""
    if placement is None or placement.num_data == 1:
        return copies
    stretch = copies // (num_pages // placement.num_data)
    return jnp.where(stretch[:, :1] == stretch[:, 1:], copies, -1)


def plan_requantize(
    placement: Placement | None,
    slot_owner: Int32[Array, "num_slots"],
    *,
    page_size: int,
) -> RequantizePlan:
    """Plans the freeze of each stretch of pages."""
    plan = functools.partial(_plan_requantize, page_size=page_size)
    if placement is None:
        return plan(slot_owner)
    each = _on_devices(placement, lambda x: _stacked(plan(x)), (BY_DATA,), BY_DATA)
    return each(slot_owner)


def requantize_staged(
    placement: Placement | None,
    pools: Pools,
    staged: StagedWindow,
    index: int,
    plan: RequantizePlan,
    inv_scales: dict[str, Float[Array, "groups"]],
    **options: Any,
) -> Pools:
    """Rewrites one layer's pools, each device its own heads and pages.

    Args:
      placement: None for one device.
      pools: of K and of V.
      staged: the window of all calibrating layers.
      index: which of them it is.
      plan: from `plan_requantize`.
      inv_scales: what to quantize K and V with.
      **options: of the op.
    """
    num_rows = staged.num_rows

    def requantize(pools, staged, owner, plan, inv_scales):
        plan = plan if placement is None else _own(plan)
        # All layers' rows are handed over, not copied, and rows named among them.
        rows = [x.reshape(-1, *x.shape[2:]) for x in staged]
        own_rows = _shifted(owner, plan, index * num_rows)
        return _requantize_staged(*pools, *rows, *own_rows, **inv_scales, **options)

    by_group = jax.tree.map(_spec_of_groups, inv_scales)
    in_specs = (POOL, STAGED_ROWS, BY_DATA, BY_DATA, by_group)
    requantize = _on_devices(placement, requantize, in_specs, (POOL, POOL))
    rows = staged.k, staged.v
    return requantize(pools, rows, staged.slot_owner, plan, inv_scales)


def _shifted(
    owner: Int32[Array, "num_slots"], plan: RequantizePlan, by: int
) -> tuple[Int32[Array, "num_slots"], RequantizePlan]:
    """Names rows counted from another one; what names none stays."""
    runs = plan.first_rows
    runs = jnp.where(runs == NO_RUN, runs, runs + by)
    return jnp.where(owner < 0, owner, owner + by), plan._replace(first_rows=runs)


def requantize_pages(
    placement: Placement | None,
    pools: Pools,
    scales: dict[str, Float[Array, "groups"]],
    **options: Any,
) -> Pools:
    """Moves each device's own heads and pages from old scales to new ones."""
    if placement is None:
        return _requantize_pages(*pools, **scales, **options)

    def requantize(pools, scales):
        return _requantize_pages(*pools, **scales, **options)

    in_specs = (POOL, jax.tree.map(_spec_of_groups, scales))
    return _on_devices(placement, requantize, in_specs, (POOL, POOL))(pools, scales)


def merge_statistics(
    placement: Placement | None, statistics: Statistics, *, groups: int
) -> Statistics:
    """Merges what all devices observed in a step: two collectives for all layers.

    Maxima and integer sums, so that their order is nobody's business. Of devices that
    hold one KV head alike, one is asked.

    Args:
      placement: None returns the statistics as they are.
      statistics: of K and V, each field `[fp8_layers, num_data, num_kv_heads]`.
      groups: 1, or the number of KV heads.

    Returns:
      The same with fields `[fp8_layers, groups]`.
    """
    if placement is None:
        return statistics
    axes = (DATA, KV_HEADS) if groups == 1 else (DATA,)

    def merge(statistics: Statistics) -> Statistics:
        amax = jnp.stack([x.amax[:, 0] for x in statistics])
        counts = jnp.stack([field[:, 0] for x in statistics for field in x[1:]])
        if groups == 1:
            amax = jnp.max(amax, axis=-1, keepdims=True)
            counts = jnp.sum(counts, axis=-1, keepdims=True, dtype=counts.dtype)
        amax, counts = lax.pmax(amax, axes), lax.psum(counts, axes)
        if groups > 1:
            amax, counts = (
                lax.all_gather(x, KV_HEADS, axis=2, tiled=True) for x in (amax, counts)
            )
        return (
            RowStatistics(amax[0], *counts[:3]),
            RowStatistics(amax[1], *counts[3:]),
        )

    in_specs = (PartitionSpec(None, DATA, KV_HEADS),)
    return _on_devices(placement, merge, in_specs, REPLICATED)(statistics)


def _on_devices(
    placement: Placement | None,
    function: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """Runs a function on each device's own part; without a placement, on all."""
    if placement is None:
        return function
    # Unchecked: kernels do not say along which axes their results are alike.
    return jax.shard_map(
        function,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _stacked[T](tree: T) -> T:
    """Gives what belongs to one stretch of `data` a leading axis."""
    return jax.tree.map(lambda x: x[None], tree)


def _own[T](tree: T) -> T:
    """Takes the leading axis away again, on the device."""
    return jax.tree.map(lambda x: x[0], tree)


def _own_pages(table: Array, num_pages: int) -> Array:
    """Numbers pages from the first of this stretch; others are read as some page."""
    return jnp.clip(table - lax.axis_index(DATA) * num_pages, 0, num_pages - 1)


def _spec_of_groups(scales: Float[Array, "groups"]) -> PartitionSpec:
    return BY_HEAD if scales.size > 1 else REPLICATED
