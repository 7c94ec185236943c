"""The append of a decode step: each program writes some heads of one token."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kv_append import mosaic_gpu_statistics as stats
from pallas_kernels.kv_append.config import AppendConfig
from pallas_kernels.kv_append.mosaic_gpu_rows import (
    WARPGROUP,
    WARPS,
    block_layout,
    heads_layouts,
    rows_per_load,
    scale_and_clip,
    store_narrow,
)
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.kv_append.reference import BothStatistics
from pallas_kernels.pages.layout import PAD_SLOT, Rows

# Rows of a head in registers at once.
_MAX_ROWS = 64


def append_tokens(
    k_pages_ref: Any,
    v_pages_ref: Any,
    k: Rows,
    v: Rows,
    plan: AppendPlan,
    inv_scales: tuple[Float[Array, "num_kv_heads"], ...],
    *,
    statistics: bool,
    config: AppendConfig,
    interpret: Any = None,
) -> BothStatistics | None:
    """Writes tokens one by one into the pools behind two refs.

    The statistics come from programs of their own, one for each head of K and of V,
    which read the rows again: so few they are that a second launch, to reduce what
    the others counted, would cost more.
    """
    if statistics:
        k, v, plan = _at_least(WARPS, k, v, plan)
    num_tokens, num_kv_heads, head_dim = k.shape
    heads = config.heads_per_program
    head_groups = num_kv_heads // heads
    num_observers = 2 * num_kv_heads if statistics else 0
    # V's bytes lie page_size apart, so its rows gain nothing from wide registers.
    layouts = heads_layouts(heads, head_dim)

    def body(k_gmem: Any, v_gmem: Any, winners_gmem: Any, slots_gmem: Any, *refs: Any):
        inv_scales_gmem, refs = refs[: len(inv_scales)], refs[len(inv_scales) :]
        k_pages_gmem, v_pages_gmem, *both_gmem = refs

        def write(program: jax.Array) -> None:
            token = lax.div(program, jnp.int32(head_groups))
            first_head = lax.rem(program, jnp.int32(head_groups)) * heads
            group = pl.ds(first_head, heads)
            slot = winners_gmem[token]
            page_size = jnp.int32(v_pages_gmem.shape[-1])
            # Before anything waits for the slot, so that all loads are in flight.
            codes = []
            for side, rows_gmem in enumerate((k_gmem, v_gmem)):
                x = _load(rows_gmem.at[token, group], layouts[side])
                inv_scale = None
                if inv_scales:
                    scales = inv_scales_gmem[side].at[group]
                    inv_scale = _load(scales, layouts[side].reduce(1))
                    inv_scale = lax.broadcast_in_dim(inv_scale, x.shape, [0])
                codes.append(scale_and_clip(x, inv_scale).astype(k_pages_gmem.dtype))

            @pl.when(slot >= 0)
            def _() -> None:
                page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
                store_narrow(k_pages_gmem.at[page, group, offset], codes[0])
                store_narrow(v_pages_gmem.at[page, group, :, offset], codes[1])

        def observe(program: jax.Array) -> None:
            is_value = program >= num_kv_heads
            head = lax.rem(program, jnp.int32(num_kv_heads))
            of_k, of_v = (x[head] for x in inv_scales_gmem)
            inv_scale = jnp.where(is_value, of_v, of_k)
            totals = _observe(k_gmem, v_gmem, is_value, slots_gmem, head, inv_scale)
            for refs, here in zip(
                (both_gmem[:4], both_gmem[4:]), (~is_value, is_value), strict=True
            ):
                pl.when(here)(functools.partial(stats.store, refs, (head,), totals))

        program = lax.axis_index("program")
        if statistics:
            pl.when(program < num_observers)(lambda: observe(program))
            pl.when(program >= num_observers)(lambda: write(program - num_observers))
        else:
            write(program)

    out_type = stats.both_shape(num_kv_heads) if statistics else ()
    flat = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_observers + num_tokens * head_groups,),
        grid_names=("program",),
        kernel_name="kv_append_tokens",
        compiler_params=WARPGROUP,
        interpret=interpret,
    )(k, v, plan.winners, plan.slots, *inv_scales, k_pages_ref, v_pages_ref)
    return stats.both(flat) if statistics else None


def _at_least(
    num_tokens: int, k: Rows, v: Rows, plan: AppendPlan
) -> tuple[Rows, Rows, AppendPlan]:
    """Adds padding where there are fewer tokens than an observer reads at once."""
    missing = max(0, num_tokens - k.shape[0])
    k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (k, v))
    slots, winners = (
        jnp.pad(x, (0, missing), constant_values=PAD_SLOT)
        for x in (plan.slots, plan.winners)
    )
    return k, v, plan._replace(slots=slots, winners=winners)


def _observe(
    k_gmem: Any,
    v_gmem: Any,
    is_value: jax.Array,
    slots_gmem: Any,
    head: jax.Array,
    inv_scale: jax.Array,
) -> stats.Totals:
    """Counts the values of one head of K or of V over all real tokens."""
    num_tokens, _, head_dim = k_gmem.shape
    per_load = rows_per_load(head_dim)
    rows = min(_MAX_ROWS, num_tokens // per_load * per_load) or WARPS
    # Larger tallies take more registers but are lowered faster.
    per_tally = math.gcd(rows, 2 * per_load)
    layout = block_layout(rows, head_dim)
    counter = stats.Counter((per_tally, head_dim), stats.find_limits(inv_scale), layout)
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1))

    def load(start: int) -> tuple[jax.Array, jax.Array]:
        # The last rows reach back rather than past the end; those are not new.
        first = min(start, num_tokens - rows)
        window = pl.ds(first, rows)
        place = window, head
        x = lax.cond(
            is_value,
            lambda: _load(v_gmem.at[place], layout),
            lambda: _load(k_gmem.at[place], layout),
        )
        slots = _load(slots_gmem.at[window], layout.reduce(1))
        return x, (slots >= 0) & (row >= start - first)

    tally = counter.nothing
    starts = range(0, num_tokens, rows)
    # The next rows are on their way while these are counted.
    coming = load(starts[0])
    for start in [*starts[1:], None]:
        x, real = coming
        if start is not None:
            coming = load(start)
        tally = counter.count(tally, x, real)
    return tally.totals()


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
