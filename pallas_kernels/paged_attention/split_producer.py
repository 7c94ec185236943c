"""The warpgroup of the split kernel that copies queries and pages."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import WorkItem, for_each_item
from pallas_kernels.paged_attention.split_refs import SplitRefs

I32 = jnp.int32


def produce(
    problem: Problem, config: Config, refs: SplitRefs, get_span: Any, block: jax.Array
) -> None:
    """Copies queries and pages of this block's items, as soon as there is room."""
    p, chunk, stages = problem, problem.chunk, config.num_stages
    # K and V fill a tile with equally many copies: the one of fewer chunks by halves.
    k_parts = p.copies_per_tile // (p.head_dim // chunk)
    v_parts = p.copies_per_tile // (p.page_size // chunk)

    def page_of(item: WorkItem, tile: jax.Array) -> jax.Array:
        """Looks up a page; any tile is safe, and any entry of the table."""
        index = lax.div(item.first, I32(p.page_size)) + tile
        last = lax.div(item.span.end - 1, I32(p.page_size))
        page = refs.block_table[item.seq, jnp.minimum(index, last)]
        return jnp.clip(page, 0, p.num_pages - 1)

    def copy_tile(pages_ref, num_rows, num_chunks, parts, page, head, slot):
        size = num_rows // parts
        for column in range(num_chunks):
            for part in range(parts):
                plgpu.copy_gmem_to_smem(
                    pages_ref.at[
                        page,
                        head,
                        pl.ds(part * size, size),
                        pl.ds(column * chunk, chunk),
                    ],
                    refs.ring_smem.at[
                        slot, pl.ds(column * num_rows + part * size, size)
                    ],
                    refs.full.at[slot],
                )

    def copy_queries(count: jax.Array, item: WorkItem) -> None:
        slot = lax.rem(count, I32(2))

        @pl.when(count >= 2)
        def _():
            plgpu.barrier_wait(refs.q_free.at[slot])

        for query in range(p.num_queries):
            rows = pl.ds(query * p.group_size, p.group_size)
            plgpu.copy_gmem_to_smem(
                refs.q.at[item.seq, query, item.head],
                refs.q_raw_smem.at[slot, rows],
                refs.q_full.at[slot],
            )

    def produce_item(count: jax.Array, item: WorkItem, copied: jax.Array):
        copy_queries(count, item)

        def step(i, carry):
            page, copied = carry
            # Looked up one step ahead: its latency hides behind the wait.
            next_page = page_of(item, _tile_of(config, i + 1, item.num_tiles))
            slot = lax.rem(copied, I32(stages))

            @pl.when(copied >= stages)
            def _():
                plgpu.barrier_wait(refs.free.at[slot])

            is_value = _is_value(config, i, item.num_tiles)

            @pl.when(is_value)
            def _():
                copy_tile(
                    refs.v_pages,
                    p.head_dim,
                    p.page_size // chunk,
                    v_parts,
                    page,
                    item.head,
                    slot,
                )

            @pl.when(jnp.logical_not(is_value))
            def _():
                copy_tile(
                    refs.k_pages,
                    p.page_size,
                    p.head_dim // chunk,
                    k_parts,
                    page,
                    item.head,
                    slot,
                )

            return next_page, copied + 1

        first_page = page_of(item, I32(0))
        end = 2 * item.num_tiles
        return lax.fori_loop(I32(0), end, step, (first_page, copied))[1]

    count, copied = for_each_item(p, config, get_span, block, produce_item)

    # A block ends with no arrival outstanding.
    @pl.loop(jnp.maximum(copied - stages, 0), copied)
    def _(i):
        plgpu.barrier_wait(refs.free.at[lax.rem(i, I32(stages))])

    @pl.loop(jnp.maximum(count - 2, 0), count)
    def _(i):
        plgpu.barrier_wait(refs.q_free.at[lax.rem(i, I32(2))])


def _is_value(config: Config, i: jax.Array, num_tiles: jax.Array) -> jax.Array:
    """Says whether the i-th tile of an item is one of V."""
    return i >= num_tiles if config.two_pass else lax.rem(i, I32(2)) == 1


def _tile_of(config: Config, i: jax.Array, num_tiles: jax.Array) -> jax.Array:
    """Gives the page, counted from the item's first, of its i-th tile."""
    if config.two_pass:
        return jnp.where(i >= num_tiles, i - num_tiles, i)
    return lax.div(i, I32(2))
