"""What the warpgroups of the prefill kernel share: operands, result, scratch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.prefill_config import (
    NUM_CONSUMERS,
    ROWS,
    PrefillConfig,
    query_slots,
)
from pallas_kernels.paged_attention.problem import Problem

# What queries and keys are multiplied as.
OPERAND = jnp.bfloat16


def value_dtype(problem: Problem) -> jnp.dtype:
    """What values are gathered as, and weights rounded to.

    FP8 codes are exact in float16 too, which rounds the weights to 2^-11.
    """
    return jnp.dtype(jnp.float16 if problem.fp8 else jnp.bfloat16)


class PrefillRefs(NamedTuple):
    """Operands, result and scratch of the kernel."""

    q: Any  # [num_seqs, padded queries, num_q_heads, head_dim] bf16
    k: Any  # [num_seqs * num_kv_heads * max_tiles, block_kv, head_dim] bf16
    v: Any  # [num_seqs * num_kv_heads * max_tiles, head_dim, block_kv] value_dtype
    k_scale: Any  # [1 or num_kv_heads] f32, or None
    v_scale: Any
    seq_lens: Any  # [num_seqs] i32
    out: Any  # like q, in the caller's dtype
    parts: Any  # of `part_types`, or None
    q_smem: Any  # [query_slots, consumers, ROWS, head_dim]; at last the output
    k_smem: Any  # [num_stages, block_kv, head_dim]
    v_smem: Any  # [num_stages, head_dim, block_kv]
    weights_smem: Any  # [consumers, ROWS, block_kv]
    q_full: Any  # [query_slots * consumers] barriers
    q_free: Any
    k_full: Any  # [num_stages] barriers
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any  # whose turn it is at the tensor cores


def part_types(problem: Problem, num_parts: int) -> list[jax.ShapeDtypeStruct]:
    """What parts of items leave: weighted sums, largest logits and sums of weights."""
    rows = (num_parts, NUM_CONSUMERS, ROWS)
    shapes = ((*rows, problem.head_dim), rows, rows)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def scratch_types(problem: Problem, config: PrefillConfig) -> list[Any]:
    """Gives the scratch of `PrefillRefs`, in its order."""
    p, c = problem, config
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def tiles(*shape: int, dtype: Any = OPERAND) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    full = plgpu.Barrier(num_barriers=c.num_stages)
    free = plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=c.num_stages)
    weights = (NUM_CONSUMERS, ROWS, c.block_kv)
    if c.weights_in_registers:
        weights = (1, 8, 64)
    return [
        tiles(query_slots(p), NUM_CONSUMERS, ROWS, p.head_dim),
        tiles(c.num_stages, c.block_kv, p.head_dim),
        tiles(c.num_stages, p.head_dim, c.block_kv, dtype=value_dtype(p)),
        tiles(*weights, dtype=value_dtype(p)),
        plgpu.Barrier(num_barriers=query_slots(p) * NUM_CONSUMERS),
        plgpu.Barrier(num_barriers=query_slots(p) * NUM_CONSUMERS),
        *(full, full, free, free),
        plgpu.Barrier(num_barriers=NUM_CONSUMERS),
    ]
