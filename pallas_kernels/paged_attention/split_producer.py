"""The warpgroup of the split kernel that copies queries and pages."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import (
    WorkItem,
    for_each_item,
    share_of,
    step_of,
)
from pallas_kernels.paged_attention.split_refs import SplitRefs

I32 = jnp.int32


def produce(
    problem: Problem, config: Config, refs: SplitRefs, get_span: Any, block: jax.Array
) -> None:
    """Copies queries and pages of this block's items, as soon as there is room."""
    p, stages, pages = problem, config.num_stages, config.pages_per_tile

    def pages_of(item: WorkItem, i: jax.Array) -> tuple[jax.Array, ...]:
        """Looks up pages; any i is safe, and any entry of the table."""
        first = lax.div(item.first, I32(p.page_size))
        first += step_of(config, i, item.num_tiles).tile * pages
        last = lax.div(item.span.end - 1, I32(p.page_size))
        found = [
            refs.block_table[item.seq, jnp.minimum(first + u, last)]
            for u in range(pages)
        ]
        return tuple(jnp.clip(page, 0, p.num_pages - 1) for page in found)

    def copy_keys(found: Sequence[jax.Array], head: jax.Array, slot: jax.Array):
        """Chunks of elements below each other; in each, the tokens of all pages."""
        num_chunks = p.head_dim // p.k_chunk
        size = p.page_size * num_chunks * pages // p.copies_per_tile(pages)
        for chunk in range(num_chunks):
            columns = pl.ds(chunk * p.k_chunk, p.k_chunk)
            for u, page in enumerate(found):
                for row in range(0, p.page_size, size):
                    to = (chunk * pages + u) * p.page_size + row
                    plgpu.copy_gmem_to_smem(
                        refs.k_pages.at[page, head, pl.ds(row, size), columns],
                        refs.k_smem.at[slot, pl.ds(to, size)],
                        refs.full.at[slot],
                    )

    def copy_values(found: Sequence[jax.Array], head: jax.Array, slot: jax.Array):
        """Chunks of tokens below each other, page by page."""
        num_chunks = p.page_size // p.v_chunk
        size = p.head_dim * num_chunks * pages // p.copies_per_tile(pages)
        for u, page in enumerate(found):
            for chunk in range(num_chunks):
                columns = pl.ds(chunk * p.v_chunk, p.v_chunk)
                for row in range(0, p.head_dim, size):
                    to = (u * num_chunks + chunk) * p.head_dim + row
                    plgpu.copy_gmem_to_smem(
                        refs.v_pages.at[page, head, pl.ds(row, size), columns],
                        refs.v_smem.at[slot, pl.ds(to, size)],
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
        first_pages = pages_of(item, I32(0))
        copy_queries(count, item)

        def step(i, carry):
            *found, copied = carry
            # Looked up one step ahead: its latency hides behind the wait.
            found_next = pages_of(item, i + 1)
            slot = lax.rem(copied, I32(stages))

            @pl.when(copied >= stages)
            def _():
                plgpu.barrier_wait(refs.free.at[slot])

            is_value = step_of(config, i, item.num_tiles).is_value

            @pl.when(is_value)
            def _():
                copy_values(found, item.head, slot)

            @pl.when(jnp.logical_not(is_value))
            def _():
                copy_keys(found, item.head, slot)

            return *found_next, copied + 1

        carry = (*first_pages, copied)
        return lax.fori_loop(I32(0), 2 * item.num_tiles, step, carry)[-1]

    share = share_of(p, config, get_span, block)
    for i, x in enumerate(share):
        refs.share_smem[i] = x
    plgpu.barrier_arrive(refs.share_full)
    count, copied = for_each_item(
        p, config, get_span, block, share, produce_item, I32(0)
    )

    # A block ends with no arrival outstanding.
    @pl.loop(jnp.maximum(copied - stages, 0), copied)
    def _(i):
        plgpu.barrier_wait(refs.free.at[lax.rem(i, I32(stages))])

    @pl.loop(jnp.maximum(count - 2, 0), count)
    def _(i):
        plgpu.barrier_wait(refs.q_free.at[lax.rem(i, I32(2))])
