"""Paged attention on Hopper: what it serves, and its two launches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import device_kind
from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.paged_attention.config import (
    SHARED_MEMORY_PER_BLOCK,
    Config,
    pick_config,
)
from pallas_kernels.paged_attention.merge_kernel import merge_splits
from pallas_kernels.paged_attention.prefill_mosaic_gpu import prefill_mosaic_gpu
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import span_of
from pallas_kernels.paged_attention.split_consumer import consume
from pallas_kernels.paged_attention.split_producer import produce
from pallas_kernels.paged_attention.split_refs import SplitRefs, scratch_types
from pallas_kernels.pages.layout import KPages, VPages

PAGE_SIZES = (64, 128)
# Query rows per KV head by head_dim that the split kernel takes: larger accumulators
# do not fit the registers. Beyond, the prefill kernels serve.
MAX_ROWS = {64: 64, 128: 64, 256: 32}


def paged_attention_mosaic_gpu(
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    k_pages: KPages,
    v_pages: VPages,
    block_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    query_starts: Int[Array, "num_seqs"] | None,
    k_scale: Float[Array, "num_scales"] | None,
    v_scale: Float[Array, "num_scales"] | None,
    softmax_scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "num_seqs num_queries num_q_heads head_dim"]:
    """Computes paged attention of a few queries per sequence with two kernels.

    The first attends to splits of the sequences, the second merges the splits that
    `seq_lens` makes live. Arguments as in `paged_attention`, and:

    Args:
      config: tuning; if None, of the table or by heuristic.
      interpret: parameters of the GPU interpreter, for tests without a GPU.

    Raises:
      NotImplementedError: if the pools or the queries are not of a kind served here.
    """
    problem = Problem.of(
        q,
        k_pages,
        block_table,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
    )
    _check_served(problem)
    if problem.num_rows > MAX_ROWS[problem.head_dim]:
        return prefill_mosaic_gpu(
            problem,
            q,
            k_pages,
            v_pages,
            block_table,
            seq_lens,
            query_starts=query_starts,
            k_scale=k_scale,
            v_scale=v_scale,
            interpret=interpret,
        )
    config = config or pick_config(problem, device_kind())
    if config.shared_memory(problem) > SHARED_MEMORY_PER_BLOCK:
        raise NotImplementedError(
            f"mosaic_gpu needs {config.shared_memory(problem)} bytes of shared memory "
            f"here, more than the {SHARED_MEMORY_PER_BLOCK} of a block."
        )
    p = problem
    grouped = (p.num_seqs, p.num_queries, p.num_kv_heads, p.group_size, p.head_dim)
    pools = (k_pages, v_pages, block_table)
    sequences = (seq_lens, query_starts)
    splits = _attend_to_splits(
        p, config, (q.reshape(grouped), *pools, k_scale), sequences, interpret
    )
    return _merge(p, config, splits, sequences, v_scale, interpret).reshape(q.shape)


def _check_served(problem: Problem) -> None:
    p = problem
    if p.pool_dtype not in (FP8_DTYPE, jnp.bfloat16):
        raise NotImplementedError(
            f"mosaic_gpu serves FP8 and BF16 pools, not {p.pool_dtype}."
        )
    if p.page_size not in PAGE_SIZES:
        raise NotImplementedError(
            f"mosaic_gpu serves page sizes {PAGE_SIZES}, not {p.page_size}."
        )
    if p.head_dim not in MAX_ROWS:
        raise NotImplementedError(
            f"mosaic_gpu serves head_dims {tuple(MAX_ROWS)}, not {p.head_dim}."
        )
    if not p.num_seqs or not p.num_queries or not p.pages_per_seq or not p.num_pages:
        raise NotImplementedError("mosaic_gpu serves no empty arrays.")


def _attend_to_splits(
    problem: Problem, config: Config, operands: tuple, sequences: tuple, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the split kernel: outputs, largest logits, sums, and their places."""
    p = problem
    num_places = config.num_places(p)
    shapes = ((p.num_rows, p.head_dim), (p.num_columns,), (p.num_columns,))
    out_type = [jax.ShapeDtypeStruct((num_places, *s), jnp.float32) for s in shapes]
    places = jax.ShapeDtypeStruct((2, p.num_seqs, p.num_kv_heads), jnp.int32)
    present, unpack = _optional(*operands, *sequences)

    def paged_attention_splits(*refs):
        *arrays, seq_lens, query_starts = unpack(refs)
        kernel_refs = SplitRefs.of(p, arrays, list(refs[len(present) :]))

        def get_span(seq):
            return span_of(p, seq_lens, query_starts, seq)

        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            consume(p, config, kernel_refs, get_span, block)

        @pl.when(warpgroup == 1)
        def _():
            produce(p, config, kernel_refs, get_span, block)

    return plgpu.kernel(
        paged_attention_splits,
        out_type=[*out_type, places],
        scratch_types=scratch_types(p, config),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*present)


def _merge(
    problem: Problem,
    config: Config,
    splits: tuple[jax.Array, ...],
    sequences: tuple,
    v_scale: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Launches the merge kernel."""
    p = problem
    shape = (p.num_seqs, p.num_queries, p.num_kv_heads, p.group_size, p.head_dim)
    present, unpack = _optional(*splits, *sequences, v_scale)

    def paged_attention_merge(*refs):
        out, out_max, out_sum, places, seq_lens, query_starts, scale = unpack(refs)
        splits = (out, out_max, out_sum, places)
        merge_splits(p, config, *splits, seq_lens, query_starts, scale, refs[-1])

    return plgpu.kernel(
        paged_attention_merge,
        out_type=jax.ShapeDtypeStruct(shape, p.q_dtype),
        grid=(p.num_seqs, p.num_kv_heads, p.num_rows),
        grid_names=("seq", "head", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*present)


def _optional(*operands: Any) -> tuple[list[Any], Any]:
    """Drops operands that are None, and gives what puts None back among their refs."""
    present = [x for x in operands if x is not None]

    def unpack(refs):
        refs = iter(refs)
        return [None if x is None else next(refs) for x in operands]

    return present, unpack
