"""The Mosaic GPU kernel that merges the splits of each sequence into its output."""

import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.layouts import HALF_ROW
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import span_of
from pallas_kernels.paged_attention.split_consumer import WEIGHT_SCALE

I32 = jnp.int32
# Splits read at once: enough loads in flight to cover their latency, and no more than
# a head has, where all sequences are of one length. 34 is two blocks of each of 132
# multiprocessors over 8 heads, and one begun: one long sequence.
_MIN_AT_ONCE, _MAX_AT_ONCE = 4, 34
# Below the floor of the split kernel, so that any split outweighs no split.
_NO_SPLIT, _START = -3e38, -2e38


def merge_splits(
    problem: Problem,
    config: Config,
    out_ref: Any,
    max_ref: Any,
    sum_ref: Any,
    places_ref: Any,
    seq_lens_ref: Any,
    query_starts_ref: Any | None,
    v_scale_ref: Any | None,
    merged_ref: Any,
) -> None:
    """Merges the live splits of one query of one head; zeros for padding queries."""
    p = problem
    seq, head, row = (lax.axis_index(name) for name in ("seq", "head", "row"))
    span = span_of(p, seq_lens_ref, query_starts_ref, seq)
    first, last = places_ref[0, seq, head], places_ref[1, seq, head]
    # The places of a head without tokens were never written.
    count = jnp.where(span.end > 0, last - first + 1, 0)
    at_once = _splits_at_once(p, config)
    # 128 threads hold 64 elements in copies: the default layouts start at 128.
    layout = None if p.head_dim % 128 == 0 else HALF_ROW

    def load_out(split):
        if layout is None:
            return out_ref[split, row]
        return plgpu.load(out_ref.at[split, row], layout=layout, optimized=False)

    def step(i, carry):
        acc, largest, total = carry
        splits = [i * at_once + u for u in range(at_once)]
        places = [jnp.minimum(first + s, last) for s in splits]
        maxima = [
            jnp.where(s < count, max_ref[place, row], _NO_SPLIT)
            for s, place in zip(splits, places, strict=True)
        ]
        sums = [sum_ref[place, row] for place in places]
        outs = [load_out(place) for place in places]
        new_largest = functools.reduce(jnp.maximum, maxima, largest)
        rescale = jnp.exp2(largest - new_largest)
        factors = [jnp.exp2(m - new_largest) for m in maxima]
        total = total * rescale + _dot(factors, sums)
        return acc * rescale + _dot(factors, outs), new_largest, total

    zeros = jnp.zeros((p.head_dim,), jnp.float32)
    if layout is not None:
        zeros = plgpu.layout_cast(zeros, layout)
    carry = (zeros, jnp.float32(_START), jnp.float32(0.0))
    num_steps = lax.div(count + (at_once - 1), I32(at_once))
    acc, _, total = lax.fori_loop(I32(0), num_steps, step, carry)

    query = lax.div(row, I32(p.group_size))
    position = span.start + query
    factor = jnp.float32(1 / WEIGHT_SCALE if p.fp8 else 1.0)
    if v_scale_ref is not None:
        factor = factor * v_scale_ref[head if v_scale_ref.shape[0] > 1 else 0]
    member = row - query * p.group_size
    real = jnp.logical_and(position >= 0, position < span.seq_len)

    @pl.when(real)
    def _():
        merged = acc * (factor / total)
        merged_ref[seq, query, head, member] = merged.astype(p.q_dtype)

    # Not a product with zero: padding may have computed NaN.
    @pl.when(jnp.logical_not(real))
    def _():
        merged_ref[seq, query, head, member] = zeros.astype(p.q_dtype)


def _splits_at_once(problem: Problem, config: Config) -> int:
    heads = problem.num_seqs * problem.num_kv_heads
    expected = -(-config.num_blocks // heads) + 1
    expected = max(_MIN_AT_ONCE, min(expected, _MAX_AT_ONCE))
    return min(expected, config.max_splits(problem))


def _dot(factors: list[Any], terms: list[Any]) -> Any:
    products = (f * t for f, t in zip(factors, terms, strict=True))
    return functools.reduce(operator.add, products)
