"""The kernel that gathers the pages a chunk sees, widened to 16 bits, in token order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.layouts import WIDE_ROWS, store
from pallas_kernels.paged_attention.prefill_config import PrefillConfig
from pallas_kernels.paged_attention.prefill_schedule import first_tile
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import Span

I32 = jnp.int32
# Rows of a tile that a block moves at once: few, so that a short prefix is spread
# over the device.
_ROWS = 32


def _units_per_tile(problem: Problem, config: PrefillConfig) -> int:
    return (config.block_kv + problem.head_dim) // _ROWS


def gather(
    problem: Problem,
    config: PrefillConfig,
    k_pages_ref: Any,  # [num_pages, num_kv_heads, page_size, head_dim]
    v_pages_ref: Any,  # [num_pages, num_kv_heads, head_dim, page_size]
    block_table_ref: Any,  # [num_seqs, pages_per_seq]
    get_span: Any,
    k_ref: Any,  # [num_seqs * num_kv_heads * max_tiles, block_kv, head_dim]
    v_ref: Any,  # [num_seqs * num_kv_heads * max_tiles, head_dim, block_kv]
) -> None:
    """Gathers this block's share of the tiles that some query sees a token of."""
    p, block_kv = problem, config.block_kv
    per_tile, stride = _units_per_tile(p, config), config.gather_blocks
    size = min(p.page_size, block_kv)

    def page_of(seq: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Looks up a page; any token is safe, and any entry of the table."""
        index = jnp.minimum(lax.div(token, I32(p.page_size)), p.pages_per_seq - 1)
        page = jnp.clip(block_table_ref[seq, index], 0, p.num_pages - 1)
        return page, lax.rem(token, I32(p.page_size))

    def gather_unit(seq: jax.Array, span: Span, unit: jax.Array) -> None:
        # Tiles slowest, and heads before them: what runs at once reads whole pages.
        part = lax.rem(unit, I32(per_tile))
        head = lax.rem(lax.div(unit, I32(per_tile)), I32(p.num_kv_heads))
        tile = lax.div(unit, I32(per_tile * p.num_kv_heads))
        first = (first_tile(config, span) + tile) * block_kv
        to = (seq * p.num_kv_heads + head) * config.max_tiles(p) + tile

        @pl.when(part < block_kv // _ROWS)
        def _():
            row = pl.multiple_of(part * _ROWS, _ROWS)
            page, offset = page_of(seq, first + row)
            rows = pl.ds(pl.multiple_of(offset, _ROWS), _ROWS)
            x = _load(k_pages_ref.at[page, head, rows])
            store(k_ref.at[to, pl.ds(row, _ROWS)], x.astype(k_ref.dtype))

        @pl.when(part >= block_kv // _ROWS)
        def _():
            row = pl.multiple_of(part * _ROWS - block_kv, _ROWS)
            rows = pl.ds(row, _ROWS)
            for column in range(0, block_kv, size):
                page, offset = page_of(seq, first + column)
                columns = pl.ds(pl.multiple_of(offset, size), size)
                x = _load(v_pages_ref.at[page, head, rows, columns])
                token = plgpu.broadcasted_iota(I32, x.shape, 1, layout=WIDE_ROWS)
                token = token + (first + column)
                # A dead slot may hold NaN, and 0 * NaN is NaN.
                x = jnp.where((token >= span.low) & (token < span.end), x, 0.0)
                at = v_ref.at[to, rows, pl.ds(column, size)]
                store(at, x.astype(v_ref.dtype))

    def gather_sequence(seq: jax.Array, before: jax.Array) -> jax.Array:
        span = get_span(seq)
        end = lax.div(span.end + (block_kv - 1), I32(block_kv))
        tiles = jnp.maximum(end - first_tile(config, span), 0)
        units = tiles * (per_tile * p.num_kv_heads)
        # Blocks take units of all sequences in turn: this one's first here.
        turn = lax.rem(lax.axis_index("block") - lax.rem(before, I32(stride)), stride)
        turn = jnp.where(turn < 0, turn + stride, turn)

        @pl.loop(0, lax.div(jnp.maximum(units - turn, 0) + (stride - 1), I32(stride)))
        def _(i):
            gather_unit(seq, span, turn + i * stride)

        return before + units

    lax.fori_loop(I32(0), I32(p.num_seqs), gather_sequence, I32(0))


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=WIDE_ROWS, optimized=False).astype(jnp.float32)
