"""Which tokens a sequence's queries see, and which block takes which part of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.config import Config
from pallas_kernels.paged_attention.problem import Problem

I32 = jnp.int32


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


class WorkItem(NamedTuple):
    """One split of one KV head of one sequence.

    `first` is its first token, page aligned, and `num_tiles` its pages.
    """

    seq: jax.Array
    head: jax.Array
    split: jax.Array
    span: Span
    first: jax.Array
    num_tiles: jax.Array


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


def num_splits(problem: Problem, config: Config, span: Span) -> jax.Array:
    tokens = config.tokens_per_split(problem)
    return lax.div(jnp.maximum(span.end - span.first, 0) + (tokens - 1), I32(tokens))


def for_each_item(
    problem: Problem,
    config: Config,
    get_span: Callable[[jax.Array], Span],
    block: jax.Array,
    body: Callable[[jax.Array, WorkItem, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Runs `body` on work items `block, block + num_blocks, ...` of all sequences.

    Items of a sequence follow each other, splits slowest. A cursor walks the
    sequences, so ragged batches spread evenly without a table of work.

    Args:
      problem: the call.
      config: its tuning.
      get_span: gives the span of a sequence.
      block: this block's index.
      body: called as `body(count, item, carry) -> carry`; carry starts as 0.

    Returns:
      How many items there were, and the last carry.
    """
    num_seqs, num_heads = problem.num_seqs, I32(problem.num_kv_heads)
    tokens = config.tokens_per_split(problem)

    def items_of(seq: jax.Array) -> jax.Array:
        span = get_span(jnp.minimum(seq, num_seqs - 1))
        return num_heads * num_splits(problem, config, span)

    def seek(index: jax.Array, seq: jax.Array, before: jax.Array):
        """Moves on to the sequence of an item; `before` counts items of earlier ones."""
        return lax.while_loop(
            lambda s: jnp.logical_and(s[0] < num_seqs, index >= s[1] + items_of(s[0])),
            lambda s: (s[0] + 1, s[1] + items_of(s[0])),
            (seq, before),
        )

    def step(state):
        count, index, seq, before, carry = state
        span = get_span(seq)
        within = index - before
        split = lax.div(within, num_heads)
        first = span.first + split * tokens
        length = jnp.minimum(span.end - first, tokens)
        num_tiles = lax.div(length + (problem.page_size - 1), I32(problem.page_size))
        head = lax.rem(within, num_heads)
        item = WorkItem(seq, head, split, span, first, num_tiles)
        carry = body(count, item, carry)
        index = index + config.num_blocks
        seq, before = seek(index, seq, before)
        return count + 1, index, seq, before, carry

    seq, before = seek(block, I32(0), I32(0))
    state = (I32(0), block, seq, before, I32(0))
    count, _, _, _, carry = lax.while_loop(lambda s: s[2] < num_seqs, step, state)
    return count, carry
