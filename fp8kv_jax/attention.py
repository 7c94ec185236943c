"""One step through the cache: begin, then observe, append and attend by layer, then end.

A loop of any make calls these three inside its own `jit`:

    step = begin_step(cache, calibration, batch)
    for layer in range(num_layers):
        q, k, v = ...
        out, step = attend(step, layer, q, k, v)
    cache, calibration = end_step(step)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from fp8kv_jax import counters as counter
from fp8kv_jax import sharded_ops
from fp8kv_jax.batch import Batch, MixedBatch
from fp8kv_jax.cache import PagedKVCache
from fp8kv_jax.calibration import (
    CalibrationState,
    freeze,
    observe,
    window_is_complete,
)
from fp8kv_jax.drift import telemetry as drift
from fp8kv_jax.parallel import Placement, check_step
from fp8kv_jax.staging import copy_owners, disown_all, stage
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8 import RowStatistics
from pallas_kernels.kv_append import AppendPlan

type Rows = Float[Array, "num_tokens num_kv_heads head_dim"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step under way: pools written so far and what its layers observed.

    Attributes:
      rows: K and V of each FP8 layer so far; None where nobody needs them any more.
      statistics: of K and of V of each FP8 layer.
      counts: of K and V of each FP8 layer, for the telemetry of a large batch.
    """

    cache: PagedKVCache
    calibration: CalibrationState
    batch: Batch | MixedBatch
    plan: AppendPlan
    rows: tuple[tuple[Rows, Rows] | None, ...] = ()
    statistics: tuple[tuple[RowStatistics, RowStatistics], ...] = ()
    counts: tuple[drift.RowCounts, ...] = ()
    placement: Placement | None = field(default=None, metadata={"static": True})


def begin_step(
    cache: PagedKVCache,
    calibration: CalibrationState,
    batch: Batch | MixedBatch,
    *,
    implementation: Implementation | None = None,
    placement: Placement | None = None,
) -> Step:
    """Copies the pages that the batch asks for and plans its writes.

    Args:
      cache: pools; donate them at the outermost `jit`.
      calibration: scales and window; donate it too.
      batch: the new tokens.
      implementation: which kernels to use; None for the best that works.
      placement: how heads, pages and sequences lie on a mesh; None for one device.

    Raises:
      ValueError: if the batch has more tokens than the staged window has room for, or
        does not divide evenly over the placement.
    """
    too_large = batch.num_tokens > calibration.max_tokens_per_step
    if calibration.staged is not None and too_large:
        raise ValueError(
            f"Expected at most {calibration.max_tokens_per_step} tokens in a step "
            f"(max_tokens_per_step), got {batch.num_tokens} with padding: the staged "
            "window has no room for more. Split the prompt into smaller chunks, or "
            "raise max_tokens_per_step in init_calibration."
        )
    check_step(placement, cache, batch)
    cache, calibration = apply_page_copies(
        cache,
        calibration,
        batch.page_copies,
        implementation=implementation,
        placement=placement,
    )
    plan = sharded_ops.plan_append(
        placement,
        batch.slot_mapping.reshape(-1),
        num_pages=cache.num_pages,
        page_size=cache.page_size,
    )
    plan = lax.optimization_barrier(plan)
    return Step(
        cache=cache,
        calibration=calibration,
        batch=batch,
        plan=plan,
        placement=placement,
    )


def apply_page_copies(
    cache: PagedKVCache,
    calibration: CalibrationState,
    page_copies: Int32[Array, "num_copies 2"],
    *,
    implementation: Implementation | None = None,
    placement: Placement | None = None,
) -> tuple[PagedKVCache, CalibrationState]:
    """Copies pages of every layer, and who owns their slots in the window.

    What `begin_step` does first; a loop that copies seldom may do it apart, and keep
    its steps free of it.

    Args:
      cache: pools; donate them at the outermost `jit`.
      calibration: likewise.
      page_copies: see `Batch`.
      implementation: which kernels to use; None for the best that works.
      placement: see `begin_step`.
    """
    if not page_copies.shape[0]:
        return cache, calibration
    page_copies = sharded_ops.possible_copies(placement, page_copies, cache.num_pages)
    pools = [
        sharded_ops.copy_pages(
            placement, k, v, page_copies, implementation=implementation
        )
        for k, v in zip(cache.k_pages, cache.v_pages, strict=True)
    ]
    k_pages, v_pages = zip(*pools, strict=True)
    staged = calibration.staged
    if staged is not None:
        staged = copy_owners(staged, page_copies, cache.page_size)
    cache = PagedKVCache(k_pages=k_pages, v_pages=v_pages)
    return cache, replace(calibration, staged=staged)


def attend(
    step: Step,
    layer: int,
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    k: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    v: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "num_seqs num_queries num_q_heads head_dim"], Step]:
    """Appends one layer's K and V to its pools and attends over them.

    K and V of an FP8 layer are cast to BF16 once, here, so that observing, staging
    and appending see the same rows whatever the compute type. Attention reads the
    batch's own K and V back from the pool, so results do not depend on chunking
    beyond rounding.

    Args:
      step: from `begin_step` or the layer before. Layers are called in order.
      layer: index of the layer.
      q: queries, after RoPE.
      k: keys, after RoPE.
      v: values.
      softmax_scale: multiplier of the logits; `head_dim ** -0.5` by default.
      sliding_window: tokens that a query sees, itself included; None for all.
      logit_soft_cap: cap of `cap * tanh(logits / cap)`; None for none.
      implementation: which kernels to use; None for the best that works.

    Returns:
      The attention output in q's dtype, and the step to go on with.
    """
    step = _append(step, layer, k, v, implementation)
    cache, calibration = step.cache, step.calibration
    k_pages, v_pages = cache.k_pages[layer], cache.v_pages[layer]
    scales = _scales_by_head(calibration, layer, num_kv_heads=k_pages.shape[1])
    outs = []
    for part, part_q in _split_queries(step.batch, q):
        out = sharded_ops.paged_attention(
            step.placement,
            part_q,
            k_pages,
            v_pages,
            part,
            scales,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            implementation=implementation,
        )
        outs.append(out.reshape(-1, *out.shape[2:]))
    out = jnp.concatenate(outs).reshape(q.shape)
    # Whoever rewrites these pools next waits until they have been read: else XLA may
    # read the last layer's after the freeze, from a copy.
    out, k_pages, v_pages = lax.optimization_barrier((out, k_pages, v_pages))
    return out, replace(step, cache=_with_pools(cache, layer, k_pages, v_pages))


def _scales_by_head(
    calibration: CalibrationState, layer: int, *, num_kv_heads: int
) -> dict[str, Float[Array, "num_kv_heads"]]:
    """What attention reads a layer with; nothing for one that is not in FP8."""
    row = calibration.row_of(layer)
    if row is None:
        return {}
    # One for each head: XLA on the GPU broadcasts those of all layers in one kernel,
    # but copies a row of one value for each layer by itself.
    return {
        "k_scale": jnp.broadcast_to(calibration.k_scale[row], (num_kv_heads,)),
        "v_scale": jnp.broadcast_to(calibration.v_scale[row], (num_kv_heads,)),
    }


def _split_queries(
    batch: Batch | MixedBatch,
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
) -> Iterator[tuple[Batch, Float[Array, "..."]]]:
    """Gives each part of a batch its queries, in the part's shape."""
    rows, start = q.reshape(-1, *q.shape[2:]), 0
    for part in batch.parts:
        own = rows[start : start + part.num_tokens]
        yield part, own.reshape(*part.slot_mapping.shape, *q.shape[2:])
        start += part.num_tokens


def _append(
    step: Step,
    layer: int,
    k: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    v: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    implementation: Implementation | None,
) -> Step:
    """Writes one layer's rows, and keeps what they say and what is to be staged."""
    calibration, cache = step.calibration, step.cache
    k_pages, v_pages = cache.k_pages[layer], cache.v_pages[layer]
    row = calibration.row_of(layer)
    dtype = jnp.bfloat16 if row is not None else k_pages.dtype
    # Made once: else XLA on the CPU repeats the projections' tails in each reader.
    k, v = lax.optimization_barrier(
        tuple(x.reshape(-1, *x.shape[2:]).astype(dtype) for x in (k, v))
    )
    inverses = {}
    if row is not None:
        inverses = {
            "k_inv_scale": calibration.k_inv_scale[row],
            "v_inv_scale": calibration.v_inv_scale[row],
        }
    k_pages, v_pages, statistics = sharded_ops.kv_append(
        step.placement,
        k_pages,
        v_pages,
        k,
        v,
        step.plan,
        inverses,
        statistics=row is not None,
        implementation=implementation,
    )
    step = replace(step, cache=_with_pools(cache, layer, k_pages, v_pages))
    if row is None or statistics is None:
        return step
    step = replace(step, statistics=(*step.statistics, statistics))
    return _keep(step, layer, row, k, v)


def _keep(step: Step, layer: int, row: int, k: Rows, v: Rows) -> Step:
    """Keeps what the end of the step needs of a layer's rows."""
    calibration = step.calibration
    needed = layer in calibration.calibrating_layers
    if calibration.telemetry is not None:
        if step.batch.num_tokens <= drift.MAX_TOKENS_AT_ONCE:
            needed = True
        else:
            counts = _count_rows(step, slice(row, row + 1), [k], [v])
            step = replace(step, counts=(*step.counts, counts))
    return replace(step, rows=(*step.rows, (k, v) if needed else None))


def _count_rows(
    step: Step, layers: slice, k: Sequence[Rows], v: Sequence[Rows]
) -> drift.RowCounts:
    """Counts K and V rows of some FP8 layers in one pass, at the scales they have."""
    calibration = step.calibration
    rows = jnp.stack([*k, *v]).reshape(2, len(k), *k[0].shape)
    inv_scale = calibration.k_inv_scale[layers], calibration.v_inv_scale[layers]
    # Sums of integers: XLA may split them over a mesh as it likes.
    return drift.count_rows(rows, jnp.stack(inv_scale), step.plan.real.reshape(-1))


def _with_pools(cache: PagedKVCache, layer: int, k: Array, v: Array) -> PagedKVCache:
    def put(pools: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
        return (*pools[:layer], new, *pools[layer + 1 :])

    return PagedKVCache(k_pages=put(cache.k_pages, k), v_pages=put(cache.v_pages, v))


def end_step(
    step: Step, *, implementation: Implementation | None = None
) -> tuple[PagedKVCache, CalibrationState]:
    """Observes the batch and, if it completes the window, freezes and requantizes.

    This is a transaction: new pools and new scales come together. The switch is one
    `lax.cond` (with three branches) over all layers, so a step costs a single
    decision, and a frozen one neither stages nor rewrites anything.

    Returns:
      The cache and the state after the step. When they return frozen, every slot
      written inside the window holds its row at the frozen scale.

    Raises:
      ValueError: if some FP8 layer was not attended to.
    """
    cache, calibration = _observe_and_freeze(step, implementation)
    if step.placement is not None:
        # Where they were when they came: the next step takes them without moving any.
        cache = step.placement.constrain(cache)
        calibration = step.placement.constrain(calibration)
    return cache, calibration


def _observe_and_freeze(
    step: Step, implementation: Implementation | None
) -> tuple[PagedKVCache, CalibrationState]:
    cache, calibration = step.cache, step.calibration
    if len(step.statistics) != len(calibration.fp8_layers):
        raise ValueError(
            f"Expected attend() for each FP8 layer {calibration.fp8_layers}, "
            f"got {len(step.statistics)} of {len(calibration.fp8_layers)}."
        )
    num_dropped = jnp.sum(step.plan.num_dropped, dtype=jnp.int32)
    num_dropped = counter.add(calibration.num_dropped, num_dropped)
    calibration = replace(calibration, num_dropped=num_dropped)
    if not calibration.fp8_layers:
        return cache, calibration
    num_staged, was_frozen = calibration.tokens_seen, calibration.frozen
    calibration = _observe_batch(step, calibration)
    if calibration.staged is None:
        return cache, calibration

    def keep(cache: PagedKVCache, calibration: CalibrationState):
        return cache, calibration

    def stage_batch(cache: PagedKVCache, calibration: CalibrationState):
        staging = np.flatnonzero(calibration.calibrates)
        k_rows, v_rows = zip(*(step.rows[row] for row in staging), strict=True)
        assert calibration.staged is not None
        staged = stage(
            calibration.staged,
            k_rows,
            v_rows,
            slots=step.batch.slot_mapping.reshape(-1),
            real=step.plan.real.reshape(-1),
            num_staged=num_staged,
        )
        return cache, replace(calibration, staged=staged)

    def stage_and_freeze(cache: PagedKVCache, calibration: CalibrationState):
        cache, calibration = stage_batch(cache, calibration)
        return _freeze_and_requantize(
            cache, calibration, implementation, step.placement
        )

    complete = window_is_complete(calibration)
    branch: Int32[Array, ""] = jnp.where(was_frozen, 0, jnp.where(complete, 2, 1))
    branches = (keep, stage_batch, stage_and_freeze)
    return lax.switch(branch, branches, cache, calibration)


def _observe_batch(step: Step, calibration: CalibrationState) -> CalibrationState:
    """Folds what the layers saw into the calibration, and the telemetry if there is."""
    telemetry = calibration.telemetry
    heads = step.cache.k_pages[0].shape[1]
    k, v = sharded_ops.merge_statistics(
        step.placement,
        _stack(step.statistics),
        groups=calibration.k_amax.shape[1] if telemetry is None else heads,
    )
    num_tokens = jnp.sum(step.plan.real, dtype=jnp.int32)
    if telemetry is not None:
        telemetry = drift.observe(
            telemetry,
            k,
            v,
            _all_counts(step),
            num_tokens=num_tokens,
            listening=~calibration.inside,
        )
        calibration = replace(calibration, telemetry=telemetry)
    return observe(calibration, k, v, num_tokens=num_tokens)


def _stack(statistics: Sequence[sharded_ops.Statistics]) -> sharded_ops.Statistics:
    """Stacks what the layers saw of K and V: `[fp8_layers, ...]` for each field.

    One concatenation for each dtype, made once: folded into its readers, those of
    single fields took XLA on an H200 12 us each for 32 layers, one layer after another.
    """
    layers = [jax.tree.leaves(of_layer) for of_layer in statistics]
    stacked: list[Array] = list(layers[0])
    for dtype in dict.fromkeys(x.dtype for x in layers[0]):
        fields = [i for i, x in enumerate(layers[0]) if x.dtype == dtype]
        joined = jnp.stack([layer[i] for layer in layers for i in fields])
        joined = lax.optimization_barrier(joined)
        joined = joined.reshape(len(layers), len(fields), *joined.shape[1:])
        for place, i in enumerate(fields):
            stacked[i] = joined[:, place]
    return jax.tree.unflatten(jax.tree.structure(statistics[0]), stacked)


def _all_counts(step: Step) -> drift.RowCounts:
    """Counts the rows of all FP8 layers, unless that was done layer by layer."""
    if step.counts:
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *step.counts)
    k_rows, v_rows = zip(*step.rows, strict=True)
    return _count_rows(step, slice(None), k_rows, v_rows)


def _freeze_and_requantize(
    cache: PagedKVCache,
    calibration: CalibrationState,
    implementation: Implementation | None,
    placement: Placement | None,
) -> tuple[PagedKVCache, CalibrationState]:
    """Rewrites every slot that owns a staged row at the scales that freeze now."""
    calibration = freeze(calibration)
    staged = calibration.staged
    assert staged is not None
    plan = sharded_ops.plan_requantize(
        placement, staged.slot_owner, page_size=cache.page_size
    )
    for index, layer in enumerate(calibration.calibrating_layers):
        row = calibration.row_of(layer)
        pools = sharded_ops.requantize_staged(
            placement,
            (cache.k_pages[layer], cache.v_pages[layer]),
            staged,
            index,
            plan,
            {
                "k_inv_scale": calibration.k_inv_scale[row],
                "v_inv_scale": calibration.v_inv_scale[row],
            },
            implementation=implementation,
        )
        cache = _with_pools(cache, layer, *pools)
    num_requantized = jnp.sum(staged.slot_owner >= 0, dtype=jnp.int32)
    return cache, replace(
        calibration, staged=disown_all(staged), num_requantized=num_requantized
    )
