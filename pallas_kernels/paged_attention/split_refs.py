"""What the two warpgroups of the split kernel share: operands, results, scratch."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.problem import Problem


class SplitRefs(NamedTuple):
    """Operands, results and scratch of the split kernel.

    Shapes in the names of `Problem` and `Config`; `pool` is the pools' dtype.
    """

    q: Any  # [num_seqs, num_queries, num_kv_heads, group_size, head_dim]
    k_pages: Any  # [num_pages, num_kv_heads, page_size, head_dim] pool
    v_pages: Any  # [num_pages, num_kv_heads, head_dim, page_size] pool
    block_table: Any  # [num_seqs, pages_per_seq] i32
    k_scale: Any  # [1 or num_kv_heads] f32, or None
    out: Any  # [num_seqs, num_kv_heads, max_splits, num_rows, head_dim] f32
    out_max: Any  # [num_seqs, num_kv_heads, max_splits, num_columns] f32
    out_sum: Any  # like out_max
    ring_smem: Any  # [num_stages, *tile_shape] pool
    q_raw_smem: Any  # [2, num_columns, head_dim], as they come
    q_smem: Any  # [operand_rows, head_dim] pool
    logits_smem: Any  # [tiles, page_size, num_columns] f32
    weights_smem: Any  # [tiles, operand_rows, page_size] pool
    out_smem: Any  # [num_columns, head_dim] f32, in the memory of weights_smem
    full: Any  # barriers of ring_smem
    free: Any
    q_full: Any  # barriers of q_raw_smem
    q_free: Any


def scratch_types(problem: Problem, config: Config) -> list[Any]:
    """Gives the scratch of `SplitRefs`, in its order; weights and output share memory."""
    p, stages = problem, config.num_stages
    tiles = config.tiles_per_split if config.two_pass else 1
    transforms = (
        plgpu.TilingTransform((8, p.chunk)),
        plgpu.SwizzleTransform(p.swizzle),
    )
    logits = (tiles, p.page_size, p.num_columns) if config.two_pass else (1, 8)
    return [
        plgpu.SMEM((stages, *p.tile_shape), p.pool_dtype, transforms=transforms),
        plgpu.SMEM((2, p.num_columns, p.head_dim), p.q_dtype),
        plgpu.SMEM((p.operand_rows, p.head_dim), p.pool_dtype, transforms=transforms),
        plgpu.SMEM(logits, jnp.float32),
        plgpu.RefUnion(
            plgpu.SMEM(
                (tiles, p.operand_rows, p.page_size),
                p.pool_dtype,
                transforms=transforms,
            ),
            plgpu.SMEM((p.num_columns, p.head_dim), jnp.float32),
        ),
        plgpu.Barrier(num_arrivals=p.copies_per_tile, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=p.num_queries, num_barriers=2),
        plgpu.Barrier(num_barriers=2),
    ]
