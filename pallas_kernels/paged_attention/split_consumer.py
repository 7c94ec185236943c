"""The warpgroup of the split kernel that computes, without ever widening FP8.

Both products are transposed, so that a page goes from memory into the tensor cores
as it lies: `S^T = K Q^T` with the tokens of a page as rows, `O^T = V^T P^T` with the
elements of a head. The queries that share the KV head are the few columns. For FP8
pools each column stands twice, as `high = e4m3(x)` and `low = e4m3(16 (x - high))`,
and the two halves of the result are added as `high + low / 16`: about the accuracy
of BF16 at the cost of FP8.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8 import FP8_MAX
from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.layouts import PRODUCT, PRODUCT_TRANSPOSED, ROWS
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import WorkItem, for_each_item
from pallas_kernels.paged_attention.split_refs import SplitRefs

I32 = jnp.int32
LOG2E = math.log2(math.e)
# The low part of an operand is a rounding error of at most 2^-4 of the high part.
_LOW_PART = 16.0
# Weights lie in [0, 1]; 256 uses the range of E4M3, and the merge divides by it.
WEIGHT_SCALE = 256.0
# Below any logit, above -inf: `-inf - _FLOOR` is -inf, `-inf - -inf` would be NaN.
_FLOOR = -1e30
# Rows of V cleared at once: few, because all of them cost every loop its registers.
_ZEROED_AT_ONCE = 16


def _store(ref: Any, x: jax.Array) -> None:
    """Stores in any layout; once per item, so that bank conflicts do not matter."""
    # jax 0.11 has no `store`, and no check of plain stores that would need it.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def consume(
    problem: Problem, config: Config, refs: SplitRefs, get_span: Any, block: jax.Array
) -> None:
    """Computes the unnormalised output, largest logit and sum of this block's items."""
    p = problem
    # Token within its tile, less its column's query: all queries share one bound.
    offset = plgpu.broadcasted_iota(
        I32, (p.page_size, p.num_columns), 0, layout=PRODUCT
    )
    if p.num_queries > 1:
        column = plgpu.broadcasted_iota(
            I32, (p.page_size, p.num_columns), 1, layout=PRODUCT
        )
        query = lax.div(column, I32(p.group_size))
        offset = offset - jnp.minimum(query, p.num_queries - 1)
    attend = _attend_two_pass if config.two_pass else _attend_online

    def consume_item(count: jax.Array, item: WorkItem, used: jax.Array) -> jax.Array:
        constant = _load_queries(p, refs, item, lax.rem(count, I32(2)))
        tiles = _Tiles(p, config, refs, item, constant, used, offset)
        out, largest, total = attend(tiles)
        out = plgpu.layout_cast(out, PRODUCT_TRANSPOSED)
        _store(refs.out_smem.transpose((1, 0)), out)
        at = (item.seq, item.head, item.split)
        _store(refs.out_max.at[at], largest)
        _store(refs.out_sum.at[at], total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.out_smem.at[pl.ds(0, p.num_rows)], refs.out.at[at])
        return used + 2 * item.num_tiles

    for_each_item(p, config, get_span, block, consume_item)
    plgpu.wait_smem_to_gmem(0)


def _load_queries(
    problem: Problem, refs: SplitRefs, item: WorkItem, slot: jax.Array
) -> jax.Array:
    """Brings the queries into the products' form.

    Returns:
      What turns a product into a logit in base 2.
    """
    p = problem
    plgpu.barrier_wait(refs.q_full.at[slot])
    # The output of the item before has left the memory that the weights reuse.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    q = plgpu.load(refs.q_raw_smem.at[slot], layout=ROWS, optimized=False)
    q = q.astype(jnp.float32)
    plgpu.barrier_arrive(refs.q_free.at[slot])
    row = plgpu.broadcasted_iota(I32, (p.num_columns, p.head_dim), 0, layout=ROWS)
    # Padding may hold anything, and must not touch the maximum below.
    real = row < p.num_rows
    if p.num_queries > 1:
        position = item.span.start + lax.div(row, I32(p.group_size))
        real &= (position >= 0) & (position < item.span.seq_len)
    q = jnp.where(real, q, 0.0)
    constant = jnp.float32(p.softmax_scale * LOG2E)
    if refs.k_scale is not None:
        constant = (
            constant * refs.k_scale[item.head if refs.k_scale.shape[0] > 1 else 0]
        )
    if p.fp8:
        amax = jnp.maximum(jnp.abs(q).max(axis=1).max(axis=0), 1e-30)
        high, low = _split_fp8(q * (FP8_MAX / amax), p.pool_dtype)
        refs.q_smem[0 : p.num_columns] = high
        refs.q_smem[p.num_columns :] = low
        constant = constant * (amax * (1 / FP8_MAX))
    else:
        refs.q_smem[...] = q.astype(p.pool_dtype)
    plgpu.commit_smem()
    return constant


def _split_fp8(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    high = x.astype(dtype)
    low = (x - high.astype(jnp.float32)) * _LOW_PART
    return high, low.astype(dtype)


class _Tiles(NamedTuple):
    """The phases that both orders of an item's tiles are made of."""

    problem: Problem
    config: Config
    refs: SplitRefs
    item: WorkItem
    constant: jax.Array  # product -> logit in base 2
    used: jax.Array  # tiles used by earlier items: gives the place in the ring
    offset: jax.Array  # [page_size, num_columns] token in its tile, less its query

    @property
    def logit_factor(self) -> jax.Array:
        """What `logits` leaves to multiply: nothing, once a cap has bent them."""
        capped = self.problem.logit_soft_cap is not None
        return jnp.float32(1.0) if capped else self.constant

    def slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(self.used + i, I32(self.config.num_stages))

    def logits(self, i: jax.Array, tile: jax.Array) -> jax.Array:
        """Multiplies the keys in the i-th tile with the queries; -inf if not seen."""
        p, refs, slot = self.problem, self.refs, self.slot(i)
        plgpu.barrier_wait(refs.full.at[slot])

        def product(acc_ref):
            for u in range(p.head_dim // p.chunk):
                plgpu.wgmma(
                    acc_ref,
                    refs.ring_smem.at[slot, pl.ds(u * p.page_size, p.page_size)],
                    refs.q_smem.at[:, pl.ds(u * p.chunk, p.chunk)].transpose((1, 0)),
                )
            return acc_ref[...]

        acc = plgpu.ACC((p.page_size, p.operand_rows), jnp.float32)
        x = self.combine(pl.run_scoped(product, acc))
        plgpu.barrier_arrive(refs.free.at[slot])
        cap = p.logit_soft_cap
        if cap is not None:
            # cap * tanh(y / cap) as cap - 2 cap / (exp(2 y / cap) + 1), in base 2.
            bent = jnp.exp2(x * (self.constant * (2 / cap))) + 1.0
            x = (cap * LOG2E) - (2 * cap * LOG2E) / bent
        # t <= start + query, with t = first + tile * page_size + token in tile.
        token = self.offset + tile * p.page_size
        bound = self.item.span.start + 1 - self.item.first
        seen = token < bound
        if p.sliding_window is not None:
            seen = jnp.logical_and(seen, token >= bound - p.sliding_window)
        return jnp.where(seen, x, -jnp.inf)

    def store_weights(self, weights: jax.Array, place: jax.Array) -> None:
        p, ref = self.problem, self.refs.weights_smem
        if not p.fp8:
            x = plgpu.layout_cast(weights, PRODUCT_TRANSPOSED)
            ref.at[place].transpose((1, 0))[...] = x.astype(p.pool_dtype)
            return
        x = plgpu.layout_cast(weights * WEIGHT_SCALE, PRODUCT_TRANSPOSED)
        for half, part in enumerate(_split_fp8(x, p.pool_dtype)):
            rows = pl.ds(half * p.num_columns, p.num_columns)
            ref.at[place, rows].transpose((1, 0))[...] = part

    def weighted_values(
        self, i: jax.Array, tile: jax.Array, place: jax.Array
    ) -> jax.Array:
        """Multiplies the values in the i-th tile with stored weights, halves apart."""
        p, refs, slot = self.problem, self.refs, self.slot(i)
        plgpu.barrier_wait(refs.full.at[slot])
        self.zero_dead_values(slot, tile)

        def product(acc_ref):
            for u in range(p.page_size // p.chunk):
                columns = pl.ds(u * p.chunk, p.chunk)
                plgpu.wgmma(
                    acc_ref,
                    refs.ring_smem.at[slot, pl.ds(u * p.head_dim, p.head_dim)],
                    refs.weights_smem.at[place, :, columns].transpose((1, 0)),
                )
            return acc_ref[...]

        acc = plgpu.ACC((p.head_dim, p.operand_rows), jnp.float32)
        out = pl.run_scoped(product, acc)
        plgpu.barrier_arrive(refs.free.at[slot])
        return out

    def zero_dead_values(self, slot: jax.Array, tile: jax.Array) -> None:
        """Clears values that no query sees: 0 * NaN is NaN in the product.

        Only the page where a sequence ends, or where a sliding window begins, has any.
        """
        p, ring = self.problem, self.refs.ring_smem
        first = self.item.first + tile * p.page_size
        low, end = self.item.span.low - first, self.item.span.end - first
        some_dead = end < p.page_size
        if p.sliding_window is not None:
            some_dead = jnp.logical_or(some_dead, low > 0)

        @pl.when(some_dead)
        def _():
            shape = (_ZEROED_AT_ONCE, p.chunk)
            token = plgpu.broadcasted_iota(I32, shape, 1, layout=ROWS)
            for u in range(p.page_size // p.chunk):
                live = (token >= low - u * p.chunk) & (token < end - u * p.chunk)

                @pl.loop(0, p.head_dim // _ZEROED_AT_ONCE)
                def _(i, u=u, live=live):
                    row = u * p.head_dim + i * _ZEROED_AT_ONCE
                    row = pl.multiple_of(row, _ZEROED_AT_ONCE)
                    at = ring.at[slot, pl.ds(row, _ZEROED_AT_ONCE)]
                    v = plgpu.load(at, layout=ROWS, optimized=False)
                    v = jnp.where(live, v.astype(jnp.float32), 0.0)
                    at[...] = v.astype(p.pool_dtype)

            plgpu.commit_smem()

    def combine(self, x: jax.Array) -> jax.Array:
        """Adds the products of the high and the low part of an FP8 operand."""
        if not self.problem.fp8:
            return x
        half = self.problem.num_columns
        return x[:, :half] + x[:, half:] * (1 / _LOW_PART)

    def full(self, rows: int, columns: int, value: float) -> jax.Array:
        x = jnp.full((rows, columns), value, jnp.float32)
        return plgpu.layout_cast(x, PRODUCT)

    def per_column(self, x: jax.Array, rows: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (rows, self.problem.num_columns), [1])


def _attend_two_pass(tiles: _Tiles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes all keys, then the weights, then all values: one maximum, no rescaling."""
    p, refs, factor = tiles.problem, tiles.refs, tiles.logit_factor
    num_tiles, page_size = tiles.item.num_tiles, p.page_size

    def keys(tile, largest):
        x = tiles.logits(tile, tile)
        refs.logits_smem[tile] = x
        return jnp.maximum(largest, x)

    # Elementwise in the loop, across threads once after it.
    largest = tiles.full(page_size, p.num_columns, -jnp.inf)
    largest = lax.fori_loop(I32(0), num_tiles, keys, largest)
    largest = jnp.maximum(largest.max(axis=0) * factor, _FLOOR)

    def weights(tile, total):
        x = plgpu.load(refs.logits_smem.at[tile], layout=PRODUCT, optimized=False)
        w = jnp.exp2(x * factor - tiles.per_column(largest, page_size))
        tiles.store_weights(w, tile)
        return total + w

    total = tiles.full(page_size, p.num_columns, 0.0)
    total = lax.fori_loop(I32(0), num_tiles, weights, total)
    plgpu.commit_smem()

    def values(tile, acc):
        # Added in float32 here: the tensor cores keep fewer bits over a long sum.
        return acc + tiles.weighted_values(num_tiles + tile, tile, tile)

    acc = tiles.full(p.head_dim, p.operand_rows, 0.0)
    acc = lax.fori_loop(I32(0), num_tiles, values, acc)
    return tiles.combine(acc), largest, total.sum(axis=0)


def _attend_online(tiles: _Tiles) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes keys and values page by page, rescaling what it has to each new maximum."""
    p, factor = tiles.problem, tiles.logit_factor

    def step(tile, carry):
        acc, largest, total = carry
        x = tiles.logits(2 * tile, tile) * factor
        new_largest = jnp.maximum(largest, x.max(axis=0))
        rescale = jnp.exp2(largest - new_largest)
        w = jnp.exp2(x - tiles.per_column(new_largest, p.page_size))
        tiles.store_weights(w, I32(0))
        total = total * tiles.per_column(rescale, p.page_size) + w
        plgpu.commit_smem()
        out = tiles.combine(tiles.weighted_values(2 * tile + 1, tile, I32(0)))
        acc = acc * tiles.per_column(rescale, p.head_dim) + out
        return acc, new_largest, total

    largest = plgpu.layout_cast(
        jnp.full((p.num_columns,), _FLOOR, jnp.float32), PRODUCT.reduce(0)
    )
    acc = tiles.full(p.head_dim, p.num_columns, 0.0)
    total = tiles.full(p.page_size, p.num_columns, 0.0)
    acc, largest, total = lax.fori_loop(
        I32(0), tiles.item.num_tiles, step, (acc, largest, total)
    )
    return acc, largest, total.sum(axis=0)
