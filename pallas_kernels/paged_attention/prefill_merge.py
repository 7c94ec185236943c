"""The kernel that merges the parts of the items that several blocks took."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.layouts import PRODUCT, store
from pallas_kernels.paged_attention.prefill_config import PrefillConfig
from pallas_kernels.paged_attention.prefill_consumer import finish
from pallas_kernels.paged_attention.prefill_schedule import (
    LastRound,
    item_of,
    queries_of,
)
from pallas_kernels.paged_attention.problem import Problem


def merge_parts(
    problem: Problem,
    config: PrefillConfig,
    last: LastRound,
    get_span: Any,
    parts_refs: Any,  # of `part_types`
    v_scale_ref: Any | None,
    out_ref: Any,  # [num_seqs, padded queries, num_q_heads, head_dim]
) -> None:
    """Merges what one consumer left of one item, if the item was cut."""
    number, consumer = lax.axis_index("item"), lax.axis_index("consumer")
    item = item_of(problem, config, get_span, last.first + number)

    @pl.when(last.cuts(item))
    def _():
        places = [number * last.parts + part for part in range(last.parts)]
        outs, maxima, sums = parts_refs
        logits = [_load(maxima.at[place, consumer]) for place in places]
        largest = functools.reduce(jnp.maximum, logits)
        acc, total = jnp.float32(0.0), jnp.float32(0.0)
        for place, x in zip(places, logits, strict=True):
            factor = jnp.exp2(x - largest)
            total += _load(sums.at[place, consumer]) * factor
            out = _load(outs.at[place, consumer])
            acc += out * lax.broadcast_in_dim(factor, out.shape, [0])
        at, position = queries_of(problem, item, consumer)
        out = finish(acc, total, v_scale_ref, item, position)
        store(out_ref.at[at], out.astype(problem.q_dtype))


def _load(ref: Any) -> Any:
    layout = PRODUCT if len(ref.shape) > 1 else PRODUCT.reduce(1)
    return plgpu.load(ref, layout=layout, optimized=False)
