"""absmax on Mosaic GPU: each program reduces some rows of one head."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.absmax.config import (
    VALUES_PER_LOAD,
    AbsmaxConfig,
    choose_config,
    rows_per_load,
)
from pallas_kernels.absmax.reference import flush
from pallas_kernels.pages.layout import Rows

HEAD_DIMS = (64, 128, 256)
_WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def absmax(
    x: Rows,
    real: Bool[Array, "num_tokens"],
    *,
    per_head: bool,
    config: AbsmaxConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "*num_kv_heads"]:
    """Reduces rows to their largest finite `abs(x)`; see `op.absmax`.

    Raises:
      NotImplementedError: for a dtype or head_dim that the kernel doesn't serve.
    """
    head_dim = x.shape[2]
    if x.dtype != jnp.bfloat16 or head_dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"Mosaic's absmax serves bfloat16 rows of head_dim {HEAD_DIMS}, got "
            f"{x.dtype} and {head_dim=}."
        )
    missing = max(0, rows_per_load(head_dim) - x.shape[0])
    if missing:
        x, real = (
            jnp.pad(x, ((0, missing), (0, 0), (0, 0))),
            jnp.pad(real, (0, missing)),
        )
    num_tokens, num_kv_heads, _ = x.shape
    if config is None:
        config = choose_config(num_tokens, num_kv_heads, head_dim)
    config.check(num_tokens, head_dim)
    rows, steps = config.rows, config.steps
    num_parts = -(-num_tokens // (rows * steps))
    layout = _row_layout(head_dim)

    def body(x_gmem: Any, real_gmem: Any, amax_gmem: Any) -> None:
        # x: [num_tokens, num_kv_heads, head_dim]; real: [num_tokens];
        # amax: [num_kv_heads, num_parts]
        program = lax.axis_index("program")
        part = lax.div(program, jnp.int32(num_kv_heads))
        head = lax.rem(program, jnp.int32(num_kv_heads))

        def step(i: jax.Array, largest: jax.Array) -> jax.Array:
            # The last rows are read again rather than rows past the end: a maximum
            # does not mind.
            start = jnp.minimum((part * steps + i) * rows, num_tokens - rows)
            window = pl.ds(start, rows)
            x = plgpu.load(x_gmem.at[window, head], layout=layout, optimized=False)
            counted = plgpu.load(
                real_gmem.at[window], layout=layout.reduce(1), optimized=False
            )
            size = jnp.abs(x.astype(jnp.float32))
            counted = lax.broadcast_in_dim(counted, size.shape, [0])
            keep = (size < jnp.inf) & (counted > 0)
            return jnp.maximum(largest, jnp.where(keep, size, 0.0))

        start = plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), layout)
        largest = lax.fori_loop(0, steps, step, start)
        amax_gmem[head, part] = jnp.max(jnp.max(largest, axis=1))

    partials = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_kv_heads, num_parts), jnp.float32),
        grid=(num_parts * num_kv_heads,),
        grid_names=("program",),
        kernel_name="absmax",
        compiler_params=_WARPGROUP,
        interpret=interpret,
    )(x, real.astype(jnp.int32))
    return flush(jnp.max(partials, axis=1 if per_head else None))


def _row_layout(head_dim: int) -> Any:
    """A register layout of rows in which each lies inside one warp.

    Each lane loads 16 bytes at a time, so that a warp covers a row or more at once.
    """
    per_load = rows_per_load(head_dim)
    per_warp = per_load // 4
    if per_warp == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((per_load, head_dim), (VALUES_PER_LOAD,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((per_load, head_dim), (per_warp, head_dim), (VALUES_PER_LOAD,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
