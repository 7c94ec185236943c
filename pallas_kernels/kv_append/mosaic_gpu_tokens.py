"""The append's token kernel: each program writes some heads of one token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.fp8 import FP8_DTYPE, FP8_MAX
from pallas_kernels.kv_append import mosaic_gpu_statistics as stats
from pallas_kernels.kv_append.config import AppendConfig
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.pages.layout import Rows

_WARPS = 4
_LANES = 32
_WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


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
) -> stats.Partials | None:
    """Writes tokens one by one into the pools behind two refs.

    A plan without page items gives each token its programs. Otherwise the tokens
    outside all items are shared among a fixed number of programs, which loop over
    the plan's list.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    direct = plan.page_items.shape[0] == 0
    num_parts = num_tokens if direct else config.leftover_programs
    heads_per_program = config.heads_per_program
    head_groups = num_kv_heads // heads_per_program
    page_size = v_pages_ref.shape[-1]
    pack, spread = _row_layouts(heads_per_program, head_dim)

    def body(*refs: Any) -> None:
        # k, v: [num_tokens, num_kv_heads, head_dim]; winners, slots: [num_tokens]
        rest: Any
        k_gmem, v_gmem, winners_gmem, slots_gmem, *rest = refs
        if not direct:
            # scattered: [num_tokens]; num_scattered: [1]
            scattered_gmem, num_scattered_gmem, *rest = rest
        inv_scales_gmem, rest = rest[: len(inv_scales)], rest[len(inv_scales) :]
        # pools as in pages/layout.py; then the partials, if asked for
        k_pages_gmem, v_pages_gmem, *partials_gmem = rest

        program = lax.axis_index("program")
        part = lax.div(program, jnp.int32(head_groups))
        first_head = lax.rem(program, jnp.int32(head_groups)) * heads_per_program
        heads = pl.ds(first_head, heads_per_program)
        # V's bytes lie page_size apart, so its rows gain nothing from wide registers.
        k_side = (k_gmem, pack, 0)
        v_side = (v_gmem, spread, 1)

        def scaled(x: jax.Array, layout: Any, which: int) -> jax.Array:
            inv_scale = plgpu.load(
                inv_scales_gmem[which].at[heads],
                layout=layout.reduce(1),
                optimized=False,
            )
            return x.astype(jnp.float32) * lax.broadcast_in_dim(inv_scale, x.shape, [0])

        def code(x: jax.Array, layout: Any, which: int) -> jax.Array:
            if not inv_scales:
                return x
            # min and max keep NaN here, and the cast does too
            y = scaled(x, layout, which)
            return jnp.minimum(jnp.maximum(y, -FP8_MAX), FP8_MAX).astype(FP8_DTYPE)

        def load_rows(token: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(
                plgpu.load(gmem.at[token, heads], layout=layout, optimized=False)
                for gmem, layout, _ in (k_side, v_side)
            )

        def write(rows: tuple[jax.Array, ...], slot: jax.Array) -> None:
            k_rows, v_rows = rows
            page = lax.div(slot, jnp.int32(page_size))
            offset = lax.rem(slot, jnp.int32(page_size))
            k_row_gmem = k_pages_gmem.at[page, heads, offset]
            v_row_gmem = v_pages_gmem.at[page, heads, :, offset]
            _store_narrow(k_row_gmem, code(k_rows, *k_side[1:]))
            _store_narrow(v_row_gmem, code(v_rows, *v_side[1:]))

        def observe(x: jax.Array, layout: Any, which: int) -> tuple[jax.Array, ...]:
            x32 = x.astype(jnp.float32)
            amax, packed = stats.value_statistics(x32, scaled(x, layout, which), None)
            counts = stats.unpack_counts(jnp.sum(packed, axis=1))
            return jnp.max(amax, axis=1), *counts

        def observe_both(rows: tuple[jax.Array, ...]) -> list[tuple[jax.Array, ...]]:
            sides = zip(rows, (k_side, v_side), strict=True)
            return [observe(x, layout, which) for x, (_, layout, which) in sides]

        def store_partials(which: int, values: tuple[jax.Array, ...]) -> None:
            amax_gmem, counts_gmem = partials_gmem
            _store_narrow(amax_gmem.at[which, heads, part], values[0])
            for i, count in enumerate(values[1:]):
                _store_narrow(counts_gmem.at[i, which, heads, part], count)

        def no_statistics(layout: Any) -> tuple[jax.Array, ...]:
            def zeros(dtype: Any) -> jax.Array:
                row = jnp.zeros((heads_per_program,), dtype)
                return plgpu.layout_cast(row, layout.reduce(1))

            return zeros(jnp.float32), *(zeros(jnp.int32),) * stats.NUM_COUNTS

        def append_direct() -> None:
            winner = winners_gmem[part]
            rows = load_rows(part)
            pl.when(winner >= 0)(lambda: write(rows, winner))
            if statistics:
                real = (slots_gmem[part] >= 0).astype(jnp.int32)
                for which, (amax, *counts) in enumerate(observe_both(rows)):
                    amax = amax * real.astype(jnp.float32)
                    store_partials(which, (amax, *(n * real for n in counts)))

        def append_leftovers() -> None:
            left = num_scattered_gmem[0] - part + (num_parts - 1)
            steps = lax.div(jnp.maximum(left, 0), jnp.int32(num_parts))

            def step(i: jax.Array, carry: Any) -> Any:
                token = scattered_gmem[part + i * num_parts]
                winner = winners_gmem[token]
                rows = load_rows(token)
                pl.when(winner >= 0)(lambda: write(rows, winner))
                if not statistics:
                    return carry
                return tuple(
                    stats.combine(old, new)
                    for old, new in zip(carry, observe_both(rows), strict=True)
                )

            start = (no_statistics(pack), no_statistics(spread)) if statistics else ()
            end = lax.fori_loop(0, steps, step, start)
            for which, values in enumerate(end):
                store_partials(which, values)

        if direct:
            append_direct()
        else:
            append_leftovers()

    out_type = stats.partials_shape(num_parts, num_kv_heads) if statistics else ()
    lists: tuple[jax.Array, ...] = (plan.winners, plan.slots)
    if not direct:
        lists = (*lists, plan.scattered, plan.num_scattered.reshape(1))
    partials = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_parts * head_groups,),
        grid_names=("program",),
        kernel_name="kv_append_tokens",
        compiler_params=_WARPGROUP,
        interpret=interpret,
    )(k, v, *lists, *inv_scales, k_pages_ref, v_pages_ref)
    return stats.Partials(*partials) if statistics else None


def _store_narrow(ref: Any, value: jax.Array) -> None:
    """Stores registers to global memory, a byte per lane if it must be.

    jax 0.12 refuses narrow stores unless told that they are meant; 0.11 has neither
    that check nor a way to say so.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _row_layouts(heads: int, head_dim: int) -> tuple[Any, Any]:
    """Register layouts of `[heads, head_dim]` with each head inside one warp.

    A head inside one warp is summed by shuffles alone; where heads are fewer than
    warps, several warps hold (and write) the same. The first layout gives a lane
    neighbouring columns, the second gives it every 32nd.
    """
    copies = _WARPS // heads
    same = (plgpu.Replicated(copies),) if copies > 1 else ()

    def warp_dims(head_axis: int) -> tuple[Any, ...]:
        return (head_axis, *same) if heads > 1 else same

    pack = plgpu.Layout.TILED(
        plgpu.Tiling(((heads, head_dim), (head_dim // _LANES,))),
        warp_dims=warp_dims(-3),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    spread = plgpu.Layout.TILED(
        plgpu.Tiling(((heads, head_dim), (_LANES,), (1,))),
        warp_dims=warp_dims(-4),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    return pack, spread
