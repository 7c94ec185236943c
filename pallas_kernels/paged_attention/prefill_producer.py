"""The warpgroup of the prefill kernel that copies queries, and tiles of K and V."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.prefill_config import (
    NUM_CONSUMERS,
    PrefillConfig,
    query_slots,
)
from pallas_kernels.paged_attention.prefill_refs import PrefillRefs
from pallas_kernels.paged_attention.prefill_schedule import Item, Walk, queries_of
from pallas_kernels.paged_attention.problem import Problem

I32 = jnp.int32


def produce(
    problem: Problem, config: PrefillConfig, refs: PrefillRefs, walk: Walk
) -> None:
    """Copies queries and tiles of the block's items, as soon as there is room."""
    stages, slots = config.num_stages, query_slots(problem)
    rings = (
        (refs.k, refs.k_smem, refs.k_full, refs.k_free),
        (refs.v, refs.v_smem, refs.v_full, refs.v_free),
    )

    def produce_item(count: jax.Array, item: Item, used: jax.Array) -> None:
        place = lax.rem(count, I32(slots))
        for consumer in range(NUM_CONSUMERS):
            barrier = place * NUM_CONSUMERS + consumer

            @pl.when(count >= slots)
            def _(barrier=barrier):
                plgpu.barrier_wait(refs.q_free.at[barrier])

            at, _ = queries_of(problem, item, consumer)
            q_smem = refs.q_smem.at[place, consumer]
            plgpu.copy_gmem_to_smem(refs.q.at[at], q_smem, refs.q_full.at[barrier])

        @pl.loop(0, item.num_tiles)
        def _(i):
            slot = lax.rem(used + i, I32(stages))
            for tiles, smem, full, free in rings:

                @pl.when(used + i >= stages)
                def _(free=free):
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(
                    tiles.at[item.place + i], smem.at[slot], full.at[slot]
                )

    count, used = walk(produce_item)

    # A block ends with no arrival outstanding.
    @pl.loop(jnp.maximum(used - stages, 0), used)
    def _(i):
        for _, _, _, free in rings:
            plgpu.barrier_wait(free.at[lax.rem(i, I32(stages))])

    @pl.loop(jnp.maximum(count - slots, 0), count)
    def _(i):
        for consumer in range(NUM_CONSUMERS):
            barrier = lax.rem(i, I32(slots)) * NUM_CONSUMERS + consumer
            plgpu.barrier_wait(refs.q_free.at[barrier])
