"""Which block of the prefill kernel takes which queries, and the tiles they see."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.prefill_config import (
    ROWS,
    PrefillConfig,
    heads_per_block,
    num_items,
    queries_per_block,
)
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.schedule import Span

I32 = jnp.int32
# A part's tiles, so that cutting is worth its cost: the sums of parts go through memory
# to another kernel, which takes an item's parts one after the other.
_MIN_TILES_PER_PART, _MAX_PARTS = 6, 16


class Item(NamedTuple):
    """What a block works on: tiles `low <= t < low + num_tiles` of a sequence.

    Tiles `full_low <= i < full_high` of them hold no token that some query can't see.
    """

    seq: jax.Array
    head: jax.Array  # the first, of the query heads
    kv_head: jax.Array
    query: jax.Array  # the first
    position: jax.Array  # of the first query
    seq_len: jax.Array
    place: jax.Array  # of tile `low` among the gathered ones
    low: jax.Array
    num_tiles: jax.Array
    full_low: jax.Array
    full_high: jax.Array
    part: jax.Array  # where a part's result goes; -1 if the item is whole


class LastRound(NamedTuple):
    """How the last items, no more than half of the blocks, are cut into equal parts.

    Part p of item i takes the turn of an item `p * num_items + i`.
    """

    first: int
    num_items: int
    parts: int

    def cuts(self, item: Item) -> jax.Array:
        """Whether an item of the round is long enough to be cut."""
        return item.num_tiles >= self.parts * _MIN_TILES_PER_PART


def last_round(problem: Problem, config: PrefillConfig) -> LastRound | None:
    """Plans the last round, if parts of items are worth while there.

    More items stay whole: the few other blocks would take short parts of many, which
    cost more than they save.
    """
    rounds, items = divmod(num_items(problem), config.num_blocks)
    if not items:
        return None
    most = config.max_tiles(problem) // _MIN_TILES_PER_PART
    parts = min(config.num_blocks // items, most, _MAX_PARTS)
    if parts < 2:
        return None
    return LastRound(first=rounds * config.num_blocks, num_items=items, parts=parts)


def item_of(
    problem: Problem, config: PrefillConfig, get_span: Any, index: jax.Array
) -> Item:
    """Finds an item: the last queries of all sequences, the longest, come first."""
    p, block_kv, window = problem, config.block_kv, problem.sliding_window
    max_tiles, queries = config.max_tiles(p), queries_per_block(p)
    parts = p.num_kv_heads * p.group_size // heads_per_block(p)
    blocks_of_queries = -(-p.num_queries // queries)
    query = (blocks_of_queries - 1 - lax.div(index, I32(p.num_seqs * parts))) * queries
    seq = lax.rem(lax.div(index, I32(parts)), I32(p.num_seqs))
    head = lax.rem(index, I32(parts)) * heads_per_block(p)
    kv_head = lax.div(head, I32(p.group_size))
    span = get_span(seq)
    position = span.start + query
    end = jnp.minimum(span.end, position + queries)
    high = lax.div(jnp.maximum(end, 0) + (block_kv - 1), I32(block_kv))
    first = low = first_tile(config, span)
    full_low = I32(0)
    if window is not None:
        low = lax.div(jnp.maximum(position - (window - 1), 0), I32(block_kv))
        low = jnp.clip(low, first, first + (max_tiles - 1))
        seen_by_all = jnp.maximum(position + (queries - window), 0)
        full_low = lax.div(seen_by_all + (block_kv - 1), I32(block_kv)) - low
    # Padding alone sees nothing, and takes one tile all the same: a loop less to guard.
    num_tiles = jnp.maximum(high - low, 1)
    full_high = lax.div(jnp.maximum(position + 1, 0), I32(block_kv)) - low
    full_low = jnp.clip(full_low, 1, num_tiles)
    return Item(
        seq=seq,
        head=head,
        kv_head=kv_head,
        query=query,
        position=position,
        seq_len=span.seq_len,
        place=(seq * p.num_kv_heads + kv_head) * max_tiles + (low - first),
        low=low,
        num_tiles=num_tiles,
        full_low=full_low,
        full_high=jnp.clip(full_high, full_low, num_tiles),
        part=I32(-1),
    )


def _part_of(last: LastRound, item: Item, index: jax.Array, part: jax.Array) -> Item:
    """Restricts an item to a part. What is not cut is part 0, the others are empty."""
    cut = (index >= last.first) & last.cuts(item)
    parts = jnp.where(cut, last.parts, 1)
    low = jnp.minimum(lax.div(item.num_tiles * part, parts), item.num_tiles)
    high = jnp.minimum(lax.div(item.num_tiles * (part + 1), parts), item.num_tiles)
    num_tiles = high - low
    full_low = jnp.clip(item.full_low - low, 1, jnp.maximum(num_tiles, 1))
    place = (index - last.first) * last.parts + part
    return item._replace(
        place=item.place + low,
        low=item.low + low,
        num_tiles=num_tiles,
        full_low=full_low,
        full_high=jnp.clip(item.full_high - low, full_low, num_tiles),
        part=jnp.where(cut, place, -1),
    )


# Runs `body(count, item, tiles of earlier items)` on each item of a block, and gives
# the count and the tiles of all.
type Walk = Callable[
    [Callable[[jax.Array, Item, jax.Array], None]], tuple[jax.Array, jax.Array]
]


def walk_of(problem: Problem, config: PrefillConfig, get_span: Any) -> Walk:
    """Shares the items out among the blocks."""
    num_blocks, total = config.num_blocks, num_items(problem)
    last, block = last_round(problem, config), lax.axis_index("block")
    if last is not None:
        total += last.num_items * (last.parts - 1)

    def index_of(turn: jax.Array) -> jax.Array:
        # There and back again, so that no block gets the longest of every round.
        back = num_blocks - 1 - block
        within = jnp.where(lax.rem(turn, I32(2)) == 0, block, back)
        return turn * num_blocks + within

    def walk(body):
        def step(state):
            turn, count, used = state
            index = index_of(turn)
            if last is None:
                item = item_of(problem, config, get_span, index)
                body(count, item, used)
                return turn + 1, count + 1, used + item.num_tiles
            part = lax.div(jnp.maximum(index - last.first, 0), I32(last.num_items))
            index = index - part * last.num_items
            item = item_of(problem, config, get_span, index)
            item = _part_of(last, item, index, part)
            taken = item.num_tiles > 0
            pl.when(taken)(lambda: body(count, item, used))
            return turn + 1, count + taken.astype(I32), used + item.num_tiles

        start = (I32(0), I32(0), I32(0))
        _, *result = lax.while_loop(lambda s: index_of(s[0]) < total, step, start)
        return tuple(result)

    return walk


def first_tile(config: PrefillConfig, span: Span) -> jax.Array:
    """The tile of tokens that a sequence's gathered tiles begin with."""
    return lax.div(span.low, I32(config.block_kv))


def queries_of(problem: Problem, item: Item, warpgroup: Any) -> tuple[Any, Any]:
    """Gives where a warpgroup's queries are, and the position of the first."""
    p, query, head, position = problem, item.query, item.head, item.position
    if heads_per_block(p) > 1:
        head = head + warpgroup
    else:
        query, position = query + warpgroup * ROWS, position + warpgroup * ROWS
    return (item.seq, pl.ds(query, ROWS), head), position
