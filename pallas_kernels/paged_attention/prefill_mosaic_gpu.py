"""Paged attention of many queries on Hopper: its launches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.config import SHARED_MEMORY_PER_BLOCK
from pallas_kernels.paged_attention.prefill_config import (
    NUM_CONSUMERS,
    PrefillConfig,
    heuristic_config,
    queries_per_block,
)
from pallas_kernels.paged_attention.prefill_consumer import consume
from pallas_kernels.paged_attention.prefill_gather import gather
from pallas_kernels.paged_attention.prefill_merge import merge_parts
from pallas_kernels.paged_attention.prefill_producer import produce
from pallas_kernels.paged_attention.prefill_refs import (
    OPERAND,
    PrefillRefs,
    part_types,
    scratch_types,
    value_dtype,
)
from pallas_kernels.paged_attention.prefill_schedule import (
    LastRound,
    last_round,
    walk_of,
)
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import span_of
from pallas_kernels.pages.layout import KPages, VPages

# Sequences go one after the other where their gathered tiles would need more.
_MAX_GATHERED_BYTES = 1 << 30
# Of a thread: together 2 * 240 + 24 <= 512 for the three warpgroups.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


def prefill_mosaic_gpu(
    problem: Problem,
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    k_pages: KPages,
    v_pages: VPages,
    block_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    query_starts: Int[Array, "num_seqs"] | None,
    k_scale: Float[Array, "num_scales"] | None,
    v_scale: Float[Array, "num_scales"] | None,
    config: PrefillConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "num_seqs num_queries num_q_heads head_dim"]:
    """Computes paged attention of many queries per sequence with up to three kernels.

    The first gathers the pages that some query sees, widened and in token order: the
    codes of FP8 are exact in 16 bits. The second attends to them. That takes memory
    for four bytes per element of a sequence's heads. The third merges what several
    blocks of the second took of the same queries, if the sequences may be so long that
    it is worth while. Queries of float32 are rounded to BF16.

    Args:
      problem: the facts of the call.
      config: tuning; by heuristic if None.
      interpret: parameters of the GPU interpreter, for tests without a GPU.
      q, k_pages, v_pages, block_table, seq_lens, query_starts, k_scale, v_scale: as
        in `paged_attention`.

    Raises:
      NotImplementedError: if the config needs more shared memory than a block has.
    """
    p = problem
    config = config or heuristic_config(p)
    if config.shared_memory(p) > SHARED_MEMORY_PER_BLOCK:
        raise NotImplementedError(
            f"mosaic_gpu needs {config.shared_memory(p)} bytes of shared memory for "
            f"prefill here, more than the {SHARED_MEMORY_PER_BLOCK} of a block."
        )
    pad = -p.num_queries % queries_per_block(p)
    padded = jnp.pad(q.astype(OPERAND), ((0, 0), (0, pad), (0, 0), (0, 0)))
    sequences = [seq_lens] if query_starts is None else [seq_lens, query_starts]

    def attend(problem: Problem, args: list[jax.Array]) -> jax.Array:
        q, table, *sequences = args
        pools = (k_pages, v_pages, table)
        tiles = _gather(problem, config, pools, sequences, interpret)
        operands = (q, *tiles, k_scale, v_scale)
        return _attend(problem, config, operands, sequences, interpret)

    args = [padded, block_table, *sequences]
    if p.num_seqs == 1 or _gathered_bytes(p, config) <= _MAX_GATHERED_BYTES:
        out = attend(p, args)
    else:
        one = dataclasses.replace(p, num_seqs=1)
        out = lax.map(lambda x: attend(one, [y[None] for y in x])[0], args)
    return out[:, : p.num_queries]


def _gathered_bytes(problem: Problem, config: PrefillConfig) -> int:
    tokens = problem.num_seqs * config.max_tiles(problem) * config.block_kv
    values = tokens * problem.num_kv_heads * problem.head_dim
    return 2 * jnp.dtype(OPERAND).itemsize * values


def _gather(
    problem: Problem,
    config: PrefillConfig,
    pools: tuple,
    sequences: list[jax.Array],
    interpret: Any,
) -> list[jax.Array]:
    """Launches the kernel that gathers K and V."""
    p = problem
    num_tiles = p.num_seqs * p.num_kv_heads * config.max_tiles(p)

    def paged_prefill_gather(*refs):
        k_pages, v_pages, table, seq_lens, *starts, k, v = refs

        def get_span(seq):
            return span_of(p, seq_lens, starts[0] if starts else None, seq)

        gather(p, config, k_pages, v_pages, table, get_span, k, v)

    return plgpu.kernel(
        paged_prefill_gather,
        out_type=[
            jax.ShapeDtypeStruct((num_tiles, config.block_kv, p.head_dim), OPERAND),
            jax.ShapeDtypeStruct(
                (num_tiles, p.head_dim, config.block_kv), value_dtype(p)
            ),
        ],
        grid=(config.gather_blocks,),
        grid_names=("block",),
        interpret=interpret,
    )(*pools, *sequences)


def _attend(
    problem: Problem,
    config: PrefillConfig,
    operands: tuple,
    sequences: list[jax.Array],
    interpret: Any,
) -> jax.Array:
    """Launches the kernel that attends, and the one that merges what was cut."""
    p, last = problem, last_round(problem, config)
    part_results = part_types(p, last.num_items * last.parts) if last else []
    has_scales = operands[-1] is not None
    present = [x for x in operands if x is not None]

    def paged_prefill(*refs):
        q, k, v, *refs = refs
        k_scale, v_scale, *refs = refs if has_scales else (None, None, *refs)
        seq_lens, *refs = refs
        query_starts, *refs = refs if len(sequences) > 1 else (None, *refs)

        def get_span(seq):
            return span_of(p, seq_lens, query_starts, seq)

        out, *refs = refs
        parts, scratch = refs[: len(part_results)], refs[len(part_results) :]
        operands = (q, k, v, k_scale, v_scale, seq_lens)
        kernel_refs = PrefillRefs(*operands, out, parts or None, *scratch)
        walk = walk_of(p, config, get_span)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            consume(p, config, kernel_refs, warpgroup, walk)

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            produce(p, config, kernel_refs, walk)

    out, *parts = plgpu.kernel(
        paged_prefill,
        out_type=[jax.ShapeDtypeStruct(operands[0].shape, p.q_dtype), *part_results],
        scratch_types=scratch_types(p, config),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*present, *sequences)
    if last is None:
        return out
    return _merge(p, config, last, out, parts, operands[-1], sequences, interpret)


def _merge(
    problem: Problem,
    config: PrefillConfig,
    last: LastRound,
    out: jax.Array,
    parts: list[jax.Array],
    v_scale: jax.Array | None,
    sequences: list[jax.Array],
    interpret: Any,
) -> jax.Array:
    """Launches the kernel that writes what was cut into the output."""
    scales = [] if v_scale is None else [v_scale]

    def paged_prefill_merge(*refs):
        *refs, out_ref = refs
        parts, refs = refs[:3], refs[3:]
        v_scale, *refs = refs if scales else (None, *refs)
        seq_lens, *starts = refs

        def get_span(seq):
            return span_of(problem, seq_lens, starts[0] if starts else None, seq)

        merge_parts(problem, config, last, get_span, parts, v_scale, out_ref)

    out_ref = jax.new_ref(out)
    plgpu.kernel(
        paged_prefill_merge,
        out_type=(),
        grid=(last.num_items, NUM_CONSUMERS),
        grid_names=("item", "consumer"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*parts, *scales, *sequences, out_ref)
    return out_ref[...]
