"""Single rows in registers: their layouts, their codes and how they are stored."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.fp8 import FP8_MAX

THREADS = 128
# Values of 2 bytes in one load of 16 bytes, the widest there is.
_VALUES_PER_LOAD = 8
WARPS = 4
_LANES = 32
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def scale_and_clip(
    x: Float[Array, "..."], inv_scale: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """Scales rows to the range of E4M3, in float32; without a scale they stay."""
    if inv_scale is None:
        return x
    # min and max keep NaN here, and so does the cast that follows
    return jnp.minimum(
        jnp.maximum(x.astype(jnp.float32) * inv_scale, -FP8_MAX), FP8_MAX
    )


def store_narrow(ref: Any, value: jax.Array) -> None:
    """Stores registers to global memory, a byte per lane if it must be.

    jax 0.12 refuses narrow stores unless told that they are meant; 0.11 has neither
    that check nor a way to say so.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def heads_layouts(heads: int, head_dim: int) -> tuple[Any, Any]:
    """Register layouts of `[heads, head_dim]` with each head inside one warp.

    Where heads are fewer than warps, several warps hold (and write) the same. The
    first layout gives a lane neighbouring columns, the second gives it every 32nd.
    """
    copies = WARPS // heads
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


def row_layout(head_dim: int) -> Any:
    """A register layout of `[1, head_dim]` with neighbouring columns apart."""
    if head_dim % THREADS:
        return heads_layouts(1, head_dim)[1]
    return plgpu.Layout.WG_STRIDED((1, head_dim), vec_size=1)


def rows_per_load(head_dim: int) -> int:
    """Counts the rows that one 16-byte load of every thread covers."""
    return THREADS * _VALUES_PER_LOAD // head_dim


def block_layout(rows: int, head_dim: int) -> Any:
    """A register layout of rows that lie inside one warp each, for wide loads.

    The rows are as many as there are warps, or a multiple of what one load covers.
    """
    if rows == WARPS:
        return heads_layouts(rows, head_dim)[0]
    per_load = rows_per_load(head_dim)
    per_warp = per_load // WARPS
    if per_warp == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((per_load, head_dim), (_VALUES_PER_LOAD,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((per_load, head_dim), (per_warp, head_dim), (_VALUES_PER_LOAD,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
