"""What the two warpgroups of the split kernel share: operands, results, scratch."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import Share


class SplitRefs(NamedTuple):
    """Operands, results and scratch of the split kernel.

    Shapes in the names of `Problem` and `Config`; `pool` is the pools' dtype.
    """

    q: Any  # [num_seqs, num_queries, num_kv_heads, group_size, head_dim]
    k_pages: Any  # [num_pages, num_kv_heads, page_size, head_dim] pool
    v_pages: Any  # [num_pages, num_kv_heads, head_dim, page_size] pool
    block_table: Any  # [num_seqs, pages_per_seq] i32
    k_scale: Any  # [1 or num_kv_heads] f32, or None
    out: Any  # [num_places, num_rows, head_dim] f32
    out_max: Any  # [num_places, num_columns] f32
    out_sum: Any  # like out_max
    places: Any  # [2, num_seqs, num_kv_heads] i32: the first and the last split's
    k_smem: Any  # [num_stages, *tile_shape of K] pool
    v_smem: Any  # [num_stages, *tile_shape of V] pool, in the memory of k_smem
    q_raw_smem: Any  # [2, num_columns, head_dim], as they come
    q_smem: Any  # [operand_rows, head_dim] pool
    logits_smem: Any  # [tiles_per_pass, num_columns / 8, tile_tokens, 8] f32
    weights_smem: Any  # [tiles_per_pass, operand_rows, tile_tokens] pool
    out_smem: Any  # [num_columns, head_dim] f32, in the memory of weights_smem
    share_smem: Any  # [len(Share._fields)] i32
    full: Any  # barriers of k_smem and v_smem
    free: Any
    q_full: Any  # barriers of q_raw_smem
    q_free: Any
    share_full: Any  # barrier of share_smem

    @classmethod
    def of(
        cls, problem: Problem, operands: list[Any], results_and_scratch: list[Any]
    ) -> "SplitRefs":
        """Puts refs into place that come as `scratch_types` orders them."""
        *results, ring, q_raw, q, logits, weights_and_out, share = results_and_scratch[
            :10
        ]
        k_smem, v_smem = ring if problem.k_chunk != problem.v_chunk else (ring, ring)
        scratch = (k_smem, v_smem, q_raw, q, logits, *weights_and_out, share)
        barriers = results_and_scratch[10:]
        return cls._make((*operands, *results, *scratch, *barriers))


def scratch_types(problem: Problem, config: Config) -> list[Any]:
    """Gives the scratch of `SplitRefs`; what shares memory comes as one."""
    p, stages, tokens = problem, config.num_stages, config.tile_tokens(problem)
    tiles = config.tiles_per_pass
    k_transforms, v_transforms = _transforms(p.k_chunk, p), _transforms(p.v_chunk, p)
    k_shape, v_shape = p.tile_shape(p.k_chunk, tokens), p.tile_shape(p.v_chunk, tokens)
    k_ring = plgpu.SMEM((stages, *k_shape), p.pool_dtype, transforms=k_transforms)
    v_ring = plgpu.SMEM((stages, *v_shape), p.pool_dtype, transforms=v_transforms)
    # A union only where needed: race detection takes one for a single buffer.
    ring = plgpu.RefUnion(k_ring, v_ring) if p.k_chunk != p.v_chunk else k_ring
    weights = (tiles, p.operand_rows, tokens)
    # Logits of a single tile stay in registers; others are kept by eight columns.
    logits = (tiles, p.num_columns // 8, tokens, 8) if tiles > 1 else (1, 8)
    return [
        ring,
        plgpu.SMEM((2, p.num_columns, p.head_dim), p.q_dtype),
        plgpu.SMEM((p.operand_rows, p.head_dim), p.pool_dtype, transforms=k_transforms),
        plgpu.SMEM(logits, jnp.float32),
        plgpu.RefUnion(
            plgpu.SMEM(weights, p.pool_dtype, transforms=v_transforms),
            plgpu.SMEM((p.num_columns, p.head_dim), jnp.float32),
        ),
        plgpu.SMEM((len(Share._fields),), jnp.int32),
        plgpu.Barrier(
            num_arrivals=p.copies_per_tile(config.pages_per_tile), num_barriers=stages
        ),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=p.num_queries, num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(),
    ]


def _transforms(chunk: int, problem: Problem) -> tuple[Any, ...]:
    return (
        plgpu.TilingTransform((8, chunk)),
        plgpu.SwizzleTransform(chunk * problem.itemsize),
    )
