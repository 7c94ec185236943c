"""The append of a decode step: each program writes some heads of one token."""

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
from pallas_kernels.pages.layout import Rows

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

        def observe(rows_gmem: Any, side: int, head: jax.Array) -> None:
            totals = _observe(rows_gmem, slots_gmem, head, inv_scales_gmem[side][head])
            stats.store(both_gmem[4 * side : 4 * side + 4], head, totals)

        program = lax.axis_index("program")
        if statistics:
            pl.when(program < num_kv_heads)(lambda: observe(k_gmem, 0, program))
            pl.when((program >= num_kv_heads) & (program < num_observers))(
                lambda: observe(v_gmem, 1, program - num_kv_heads)
            )
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


def _observe(
    rows_gmem: Any, slots_gmem: Any, head: jax.Array, inv_scale: jax.Array
) -> stats.Totals:
    """Counts the values of one head over all real tokens."""
    num_tokens, _, head_dim = rows_gmem.shape
    limits = stats.find_limits(inv_scale)
    if num_tokens < WARPS:
        layout = heads_layouts(1, head_dim)[0]
        counter = stats.Counter((1, head_dim), limits, layout)
        tally = counter.nothing
        for token in range(num_tokens):
            x = _load(rows_gmem.at[token, pl.ds(head, 1)], layout)
            slot = _load(slots_gmem.at[pl.ds(token, 1)], layout.reduce(1))
            tally = counter.count(tally, x, slot >= 0)
        return tally.totals()

    per_load = rows_per_load(head_dim)
    rows = min(_MAX_ROWS, num_tokens // per_load * per_load) or WARPS
    # Larger tallies take more registers but are lowered faster.
    per_tally = math.gcd(rows, 2 * per_load)
    layout = block_layout(rows, head_dim)
    counter = stats.Counter((per_tally, head_dim), limits, layout)
    tally = counter.nothing
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1))
    for start in range(0, num_tokens, rows):
        # The last rows reach back rather than past the end; those are not new.
        first = min(start, num_tokens - rows)
        window = pl.ds(first, rows)
        x = _load(rows_gmem.at[window, head], layout)
        slots = _load(slots_gmem.at[window], layout.reduce(1))
        tally = counter.count(tally, x, (slots >= 0) & (row >= start - first))
    return tally.totals()


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
