"""Which tokens a sequence's queries see, and which block takes which part of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.problem import Problem

I32 = jnp.int32
# Lengths read at once: enough loads in flight to cover their latency.
_LENGTHS_AT_ONCE = 8
# Up to so many tiles for each block, all blocks take equally many: then splits of a
# sequence that is a multiple of them end where it ends, and no block takes two.
_EVEN_SHARE = 8
# What the start and the end of a split cost, in the time of a tile.
_TILES_PER_HEAD = 2


class Span(NamedTuple):
    """The tokens that some query of a sequence sees: `low <= t < end`.

    `first` is low rounded down to a page; `start` the position of the first query.
    Without a query at a valid position, end is 0.
    """

    first: jax.Array
    low: jax.Array
    end: jax.Array
    start: jax.Array
    seq_len: jax.Array


class Share(NamedTuple):
    """A block's stretch of the line of all work, `first <= unit < end`.

    Each KV head of a sequence has as many units as tiles, and then `extra` ones, which
    stand for what a split costs beside its tiles. `first` lies in `seq` or a later
    sequence; `before` counts the units of those before `seq`.
    """

    first: jax.Array
    end: jax.Array
    extra: jax.Array
    seq: jax.Array
    before: jax.Array


class WorkItem(NamedTuple):
    """A split: the tiles of one KV head of one sequence that one block takes.

    `first` is its first token, page aligned. Splits of a head stand side by side among
    the results, at `place`.
    """

    seq: jax.Array
    head: jax.Array
    place: jax.Array
    span: Span
    first: jax.Array
    num_tiles: jax.Array
    is_first: jax.Array
    is_last: jax.Array


class Step(NamedTuple):
    """What stands in the ring at one place: a tile's keys or its values."""

    tile: jax.Array
    is_value: jax.Array


def span_of(
    problem: Problem, seq_lens_ref: Any, query_starts_ref: Any | None, seq: jax.Array
) -> Span:
    """Reads the span of a sequence, bounded by what the block table can hold."""
    seq_len = jnp.clip(seq_lens_ref[seq], 0, problem.capacity)
    if query_starts_ref is None:
        start = seq_len - problem.num_queries
    else:
        # Bounded, so that sums with it stay within int32.
        start = jnp.clip(query_starts_ref[seq], -problem.num_queries, problem.capacity)
    end = jnp.minimum(seq_len, start + problem.num_queries)
    end = jnp.where(start < seq_len, jnp.maximum(end, 0), 0)
    if problem.sliding_window is None:
        low = I32(0)
    else:
        low = jnp.maximum(start - (problem.sliding_window - 1), 0)
    first = lax.div(low, I32(problem.page_size)) * problem.page_size
    return Span(first, low, end, start, seq_len)


def tiles_in(problem: Problem, config: Config, span: Span) -> jax.Array:
    tokens = config.tile_tokens(problem)
    return lax.div(jnp.maximum(span.end - span.first, 0) + (tokens - 1), I32(tokens))


def step_of(config: Config, i: jax.Array, num_tiles: jax.Array) -> Step:
    """Orders the copies of a split: the keys of one pass, its values, the next pass."""
    size = config.tiles_per_pass
    first = lax.div(i, I32(2 * size)) * size
    within, in_pass = i - 2 * first, jnp.minimum(num_tiles - first, size)
    is_value = within >= in_pass
    return Step(first + within - jnp.where(is_value, in_pass, 0), is_value)


def share_of(
    problem: Problem,
    config: Config,
    get_span: Callable[[jax.Array], Span],
    block: jax.Array,
) -> Share:
    """Finds a block's share of the work of all sequences.

    All units form one line, by sequence, KV head and token, and each block takes as
    much of it as any other, whatever the lengths. There is no table of work: every
    block reads all lengths, so it does little for each.
    """
    num_seqs, num_heads = problem.num_seqs, problem.num_kv_heads

    def add(seq, totals):
        total, longest, live = totals
        tiles = tiles_in(problem, config, get_span(seq))
        return total + tiles, jnp.maximum(longest, tiles), live + jnp.minimum(tiles, 1)

    total, longest, live = _for_each_seq(num_seqs, add, (I32(0),) * 3)
    # Where there is enough work to be shared evenly, a head counts for some more: else
    # blocks of short sequences are last. Of one length, all blocks have as many heads.
    is_even = total == longest * num_seqs
    is_small = total * num_heads < _EVEN_SHARE * config.num_blocks
    extra = jnp.where(is_even | is_small, 0, _TILES_PER_HEAD)
    first, end = _stretch(config, (total + extra * live) * num_heads, block)
    # Sequences of one length need no search.
    units = jnp.maximum(longest * num_heads, 1)
    seq = jnp.where(is_even, jnp.minimum(lax.div(first, units), num_seqs - 1), 0)
    share = Share(first, end, extra, seq, seq * units)
    share = _seek(problem, config, get_span, share)
    # Between a head's tiles and the next head there is nothing to do.
    tiles = tiles_in(problem, config, get_span(share.seq))
    units = jnp.maximum(tiles + extra, 1)
    within = lax.rem(first - share.before, units)
    return share._replace(first=first + jnp.where(within < tiles, 0, units - within))


def for_each_item[T](
    problem: Problem,
    config: Config,
    get_span: Callable[[jax.Array], Span],
    block: jax.Array,
    share: Share,
    body: Callable[[jax.Array, WorkItem, T], T],
    carry: T,
) -> tuple[jax.Array, T]:
    """Runs `body` on the splits of a block: what its share holds of each head.

    Args:
      problem: the call.
      config: its tuning.
      get_span: gives the span of a sequence.
      block: this block's index.
      share: this block's share.
      body: called as `body(count, item, carry) -> carry`.
      carry: what the first call gets.

    Returns:
      How many splits there were, and the last carry.
    """

    def step(state):
        count, share, carry = state
        share = _seek(problem, config, get_span, share)
        span = get_span(share.seq)
        tiles = tiles_in(problem, config, span)
        units = tiles + share.extra
        head = lax.div(share.first - share.before, units)
        start = share.before + head * units
        skipped = share.first - start
        num_tiles = jnp.minimum(share.end - start, tiles) - skipped
        item = WorkItem(
            seq=share.seq,
            head=head,
            # One more with each block and with each head: no two splits share it.
            place=block + share.seq * problem.num_kv_heads + head,
            span=span,
            first=span.first + skipped * config.tile_tokens(problem),
            num_tiles=num_tiles,
            is_first=skipped == 0,
            is_last=skipped + num_tiles == tiles,
        )
        carry = body(count, item, carry)
        return count + 1, share._replace(first=start + units), carry

    state = (I32(0), share, carry)
    count, _, carry = lax.while_loop(lambda s: s[1].first < s[1].end, step, state)
    return count, carry


def _seek(
    problem: Problem,
    config: Config,
    get_span: Callable[[jax.Array], Span],
    share: Share,
) -> Share:
    """Moves on to the sequence where a share begins; to the last one if past all."""

    def end_of(seq, before):
        tiles = tiles_in(problem, config, get_span(seq))
        units = problem.num_kv_heads * (tiles + share.extra)
        return before + jnp.where(tiles > 0, units, 0)

    def step(state):
        seq, _, end = state
        return seq + 1, end, end_of(seq + 1, end)

    seq, before, _ = lax.while_loop(
        lambda s: (share.first >= s[2]) & (s[0] < problem.num_seqs - 1),
        step,
        (share.seq, share.before, end_of(share.seq, share.before)),
    )
    return share._replace(seq=seq, before=before)


def _for_each_seq[T](num_seqs: int, body: Callable[[jax.Array, T], T], carry: T) -> T:
    """Runs `body` on each sequence, several at once."""

    def run(first, count, carry):
        for u in range(count):
            carry = body(first + u, carry)
        return carry

    rounds, rest = divmod(num_seqs, _LENGTHS_AT_ONCE)
    carry = lax.fori_loop(
        I32(0),
        I32(rounds),
        lambda i, carry: run(i * _LENGTHS_AT_ONCE, _LENGTHS_AT_ONCE, carry),
        carry,
    )
    return run(I32(num_seqs - rest), rest, carry)


def _stretch(
    config: Config, total: jax.Array, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gives the first unit of a block, and the one past its last."""
    share = lax.div(total, I32(config.num_blocks))
    rest = total - share * config.num_blocks
    even = share + jnp.where(rest > 0, 1, 0)

    def start(block):
        return jnp.where(
            share < _EVEN_SHARE,
            jnp.minimum(block * even, total),
            block * share + jnp.minimum(block, rest),
        )

    return start(block), start(block + 1)
