"""The warpgroup of the split kernel that computes, without ever widening FP8.

Both products are transposed, so that a page goes from memory into the tensor cores
as it lies: `S^T = K Q^T` with the tokens of a page as rows, `O^T = V^T P^T` with the
elements of a head. The queries that share the KV head are the few columns. For FP8
pools each column stands twice, as `high = e4m3(x)` and `low = e4m3(16 (x - high))`,
and the two halves of the result are added as `high + low / 16`: about the accuracy
of BF16 at the cost of FP8.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8 import FP8_MAX
from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.layouts import (
    PRODUCT,
    PRODUCT_TRANSPOSED,
    ROWS,
    store,
)
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import Share, WorkItem, for_each_item
from pallas_kernels.paged_attention.split_refs import SplitRefs

I32 = jnp.int32
LOG2E = math.log2(math.e)
# The low part of an operand is a rounding error of at most 2^-4 of the high part.
_LOW_PART = 16.0
# Weights lie in [0, 1]; 256 uses the range of E4M3, and the merge divides by it.
WEIGHT_SCALE = 256.0
# Below any logit, above -inf: `-inf - _FLOOR` is -inf, `-inf - -inf` would be NaN.
_FLOOR = -1e30
# Logits multiplied at once, high and low parts: 16 registers of each thread.
_LOGITS_AT_ONCE = 16 * 128
_COLUMNS_AT_ONCE = 8
# Rows of V cleared at once: few, because all of them cost every loop its registers.
_ZEROED_AT_ONCE = 16


def _store_by_columns(ref: Any, parts: tuple[jax.Array, ...]) -> None:
    size = ref.shape[0] // len(parts)
    for i, part in enumerate(parts):
        store(ref.at[pl.ds(i * size, size)], part)


def consume(
    problem: Problem, config: Config, refs: SplitRefs, get_span: Any, block: jax.Array
) -> None:
    """Computes the unnormalised output, largest logit and sum of this block's splits."""
    p, shape = problem, (_rows_at_once(problem, config), problem.num_columns)
    # Token among its rows, less its column's query: all queries share one bound.
    offset = plgpu.broadcasted_iota(I32, shape, 0, layout=PRODUCT)
    if p.num_queries > 1:
        column = plgpu.broadcasted_iota(I32, shape, 1, layout=PRODUCT)
        query = lax.div(column, I32(p.group_size))
        offset = offset - jnp.minimum(query, p.num_queries - 1)

    def consume_item(count: jax.Array, item: WorkItem, used: jax.Array) -> jax.Array:
        _store_place(refs, item)
        constant = _load_queries(p, refs, item, lax.rem(count, I32(2)))
        tiles = _Tiles(p, config, refs, item, constant, used, offset)
        out, largest, totals = _attend(tiles)
        out = plgpu.layout_cast(out, PRODUCT_TRANSPOSED)
        store(refs.out_smem.transpose((1, 0)), out)
        store(refs.out_max.at[item.place], largest)
        _store_by_columns(refs.out_sum.at[item.place], totals)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            refs.out_smem.at[pl.ds(0, p.num_rows)], refs.out.at[item.place]
        )
        return used + 2 * item.num_tiles

    # Found once for both warpgroups, which would take each other's issue slots.
    plgpu.barrier_wait(refs.share_full)
    share = Share._make(refs.share_smem[i] for i in range(len(Share._fields)))
    for_each_item(p, config, get_span, block, share, consume_item, I32(0))
    # Read is enough: the end of the launch waits for the writes.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_place(refs: SplitRefs, item: WorkItem) -> None:
    """Says where the splits of a head begin and end, for the merge."""
    for i, is_mine in enumerate((item.is_first, item.is_last)):

        @pl.when(is_mine)
        def _(i=i):
            refs.places[i, item.seq, item.head] = item.place


def _rows_at_once(problem: Problem, config: Config) -> int:
    """Keys of a tile that are multiplied at once, as many as registers allow."""
    tokens = config.tile_tokens(problem)
    if config.tiles_per_pass == 1:
        return tokens
    return min(tokens, max(64, _LOGITS_AT_ONCE // problem.operand_rows))


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
    # After the fence: what overwrites the slot is a copy, in another proxy. Before it,
    # blocks of many splits now and then read the queries of a later one.
    plgpu.barrier_arrive(refs.q_free.at[slot])
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
    offset: jax.Array  # [rows at once, num_columns] token, less its column's query

    @property
    def num_tokens(self) -> int:
        return self.config.tile_tokens(self.problem)

    @property
    def logit_factor(self) -> jax.Array:
        """What `logits` leaves to multiply: nothing, once a cap has bent them."""
        capped = self.problem.logit_soft_cap is not None
        return jnp.float32(1.0) if capped else self.constant

    def slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(self.used + i, I32(self.config.num_stages))

    def logits(self, slot: jax.Array, tile: jax.Array, row: int, rows: int):
        """Multiplies some keys of a tile with the queries; -inf where not seen."""
        p, refs = self.problem, self.refs

        def product(acc_ref):
            for u in range(p.head_dim // p.k_chunk):
                columns = pl.ds(u * p.k_chunk, p.k_chunk)
                plgpu.wgmma(
                    acc_ref,
                    refs.k_smem.at[slot, pl.ds(u * self.num_tokens + row, rows)],
                    refs.q_smem.at[:, columns].transpose((1, 0)),
                )
            return acc_ref[...]

        acc = plgpu.ACC((rows, p.operand_rows), jnp.float32)
        x = self.combine(pl.run_scoped(product, acc))
        cap = p.logit_soft_cap
        if cap is not None:
            # cap * tanh(y / cap) as cap - 2 cap / (exp(2 y / cap) + 1), in base 2.
            bent = jnp.exp2(x * (self.constant * (2 / cap))) + 1.0
            x = (cap * LOG2E) - (2 * cap * LOG2E) / bent
        # t <= start + query, with t = first + tile * tile_tokens + token in tile.
        bound = self.item.span.start + 1 - self.item.first - tile * self.num_tokens
        bound = bound - row
        seen = self.offset < bound
        if p.sliding_window is not None:
            seen = jnp.logical_and(seen, self.offset >= bound - p.sliding_window)
        return jnp.where(seen, x, -jnp.inf)

    def store_weights(self, weights: jax.Array, place: jax.Array, column: int = 0):
        """Stores weights of some columns, for FP8 their high and their low part."""
        p, ref, count = self.problem, self.refs.weights_smem, weights.shape[1]
        x = plgpu.layout_cast(weights, PRODUCT_TRANSPOSED)
        if p.fp8:
            parts = _split_fp8(x * WEIGHT_SCALE, p.pool_dtype)
        else:
            parts = (x.astype(p.pool_dtype),)
        for half, part in enumerate(parts):
            rows = pl.ds(half * p.num_columns + column, count)
            ref.at[place, rows].transpose((1, 0))[...] = part

    def weighted_values(
        self, i: jax.Array, tile: jax.Array, place: jax.Array
    ) -> jax.Array:
        """Multiplies the values in the i-th tile with stored weights."""
        p, refs, slot = self.problem, self.refs, self.slot(i)
        plgpu.barrier_wait(refs.full.at[slot])
        self.zero_dead_values(slot, tile)

        def product(acc_ref):
            for u in range(self.num_tokens // p.v_chunk):
                rows = pl.ds(u * p.head_dim, p.head_dim)
                columns = pl.ds(u * p.v_chunk, p.v_chunk)
                plgpu.wgmma(
                    acc_ref,
                    refs.v_smem.at[slot, rows],
                    refs.weights_smem.at[place, :, columns].transpose((1, 0)),
                )
            return acc_ref[...]

        acc = plgpu.ACC((p.head_dim, p.operand_rows), jnp.float32)
        out = pl.run_scoped(product, acc)
        plgpu.barrier_arrive(refs.free.at[slot])
        return self.combine(out)

    def zero_dead_values(self, slot: jax.Array, tile: jax.Array) -> None:
        """Clears values that no query sees: 0 * NaN is NaN in the product.

        Only the tile where a sequence ends, or where a sliding window begins, has any.
        """
        p, ring = self.problem, self.refs.v_smem
        first = self.item.first + tile * self.num_tokens
        low, end = self.item.span.low - first, self.item.span.end - first
        some_dead = end < self.num_tokens
        if p.sliding_window is not None:
            some_dead = jnp.logical_or(some_dead, low > 0)

        @pl.when(some_dead)
        def _():
            shape = (_ZEROED_AT_ONCE, p.v_chunk)
            token = plgpu.broadcasted_iota(I32, shape, 1, layout=ROWS)
            for u in range(self.num_tokens // p.v_chunk):
                live = (token >= low - u * p.v_chunk) & (token < end - u * p.v_chunk)

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

    def columns(self, count: int, value: float) -> jax.Array:
        x = jnp.full((count,), value, jnp.float32)
        return plgpu.layout_cast(x, PRODUCT.reduce(0))

    def per_column(self, x: jax.Array, rows: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (rows, *x.shape), [1])


def _attend(tiles: _Tiles) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Takes a split pass by pass, rescaling what it has to each new maximum.

    Returns:
      The output, the largest logits, and the sums of weights, some columns at a time.
    """
    p, size = tiles.problem, tiles.config.tiles_per_pass
    attend_pass = _take_tile if size == 1 else _take_tiles
    at_once = p.num_columns if size == 1 else _COLUMNS_AT_ONCE
    totals = (tiles.columns(at_once, 0.0),) * (p.num_columns // at_once)
    acc = tiles.full(p.head_dim, p.num_columns, 0.0)
    num_passes = lax.div(tiles.item.num_tiles + (size - 1), I32(size))
    carry = (acc, tiles.columns(p.num_columns, _FLOOR), totals)
    step = functools.partial(attend_pass, tiles)
    return lax.fori_loop(I32(0), num_passes, step, carry)


def _take_tiles(tiles: _Tiles, i: jax.Array, carry: tuple) -> tuple:
    """Takes the keys of several tiles, then the weights, then the values."""
    acc, largest, totals = carry
    p, refs, factor = tiles.problem, tiles.refs, tiles.logit_factor
    size, tokens = tiles.config.tiles_per_pass, tiles.num_tokens
    rows, first = _rows_at_once(p, tiles.config), i * size
    num_tiles = jnp.minimum(tiles.item.num_tiles - first, size)
    # Some columns at a time: all of them cost every loop its registers.
    parts = [
        slice(c, c + _COLUMNS_AT_ONCE)
        for c in range(0, p.num_columns, _COLUMNS_AT_ONCE)
    ]

    def keys(place, highest):
        slot = tiles.slot(2 * first + place)
        plgpu.barrier_wait(refs.full.at[slot])
        for row in range(0, tokens, rows):
            x = tiles.logits(slot, first + place, row, rows)
            for part, columns in enumerate(parts):
                refs.logits_smem[place, part, row : row + rows] = x[:, columns]
            highest = jnp.maximum(highest, x)
        plgpu.barrier_arrive(refs.free.at[slot])
        return highest

    # Elementwise in the loop, across threads once after it.
    highest = tiles.full(rows, p.num_columns, -jnp.inf)
    highest = lax.fori_loop(I32(0), num_tiles, keys, highest)
    new_largest = jnp.maximum(largest, highest.max(axis=0) * factor)
    rescale = jnp.exp2(largest - new_largest)

    def weights(place, added):
        sums = []
        for part, columns in enumerate(parts):
            at = refs.logits_smem.at[place, part]
            x = plgpu.load(at, layout=PRODUCT, optimized=False)
            w = jnp.exp2(x * factor - tiles.per_column(new_largest[columns], tokens))
            tiles.store_weights(w, place, columns.start)
            sums.append(added[part] + w)
        return tuple(sums)

    added = (tiles.full(tokens, _COLUMNS_AT_ONCE, 0.0),) * len(parts)
    added = lax.fori_loop(I32(0), num_tiles, weights, added)
    totals = tuple(
        total * rescale[columns] + x.sum(axis=0)
        for total, columns, x in zip(totals, parts, added, strict=True)
    )
    plgpu.commit_smem()

    def values(place, acc):
        # Added in float32 here: the tensor cores keep fewer bits over a long sum.
        ring = 2 * first + num_tiles + place
        return acc + tiles.weighted_values(ring, first + place, place)

    acc = acc * tiles.per_column(rescale, p.head_dim)
    acc = lax.fori_loop(I32(0), num_tiles, values, acc)
    return acc, new_largest, totals


def _take_tile(tiles: _Tiles, i: jax.Array, carry: tuple) -> tuple:
    """Takes the keys and the values of one tile; its logits stay in registers."""
    acc, largest, (total,) = carry
    p, refs, tokens = tiles.problem, tiles.refs, tiles.num_tokens
    slot = tiles.slot(2 * i)
    plgpu.barrier_wait(refs.full.at[slot])
    x = tiles.logits(slot, i, 0, tokens) * tiles.logit_factor
    plgpu.barrier_arrive(refs.free.at[slot])
    new_largest = jnp.maximum(largest, x.max(axis=0))
    rescale = jnp.exp2(largest - new_largest)
    w = jnp.exp2(x - tiles.per_column(new_largest, tokens))
    tiles.store_weights(w, I32(0))
    total = total * rescale + w.sum(axis=0)
    plgpu.commit_smem()
    acc = acc * tiles.per_column(rescale, p.head_dim)
    acc = acc + tiles.weighted_values(2 * i + 1, i, I32(0))
    return acc, new_largest, (total,)
