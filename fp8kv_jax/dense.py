"""Batches for loops without an allocator: each row owns a run of pages."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from fp8kv_jax.batch import Batch
from fp8kv_jax.cache import PagedKVCache


def dense_batch(
    token_ids: Int[Array, "num_seqs num_queries"],
    start: Int32[Array, ""] | int,
    cache: PagedKVCache,
) -> Batch:
    """Lays new tokens out as a dense cache would: row by row, all at one position.

    For a loop whose cache was `[num_seqs, max_len, ...]`; works inside `jit`. Each row
    of the batch owns `num_pages // num_seqs` pages of the cache, one after another.
    Tokens past a row's pages are padding: not written, observed or attended to.

    Args:
      token_ids: new tokens, the same number for each sequence.
      start: position of the first of them.
      cache: gives the number of pages and their size.

    Raises:
      ValueError: if the cache has fewer pages than the batch has rows.
    """
    num_seqs, num_queries = token_ids.shape
    pages_per_seq = cache.num_pages // num_seqs
    if pages_per_seq == 0:
        raise ValueError(
            f"Expected a page for each of {num_seqs} sequences, got a cache of "
            f"{cache.num_pages}."
        )
    max_len = pages_per_seq * cache.page_size
    positions = start + jnp.arange(num_queries, dtype=jnp.int32)[None, :]
    first_slots = max_len * jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    slots = jnp.where(positions < max_len, first_slots + positions, -1)
    seq_len = jnp.minimum(start + num_queries, max_len)
    pages = jnp.arange(num_seqs * pages_per_seq, dtype=jnp.int32)
    return Batch(
        token_ids=token_ids.astype(jnp.int32),
        slot_mapping=slots,
        query_starts=jnp.full((num_seqs,), start, jnp.int32),
        seq_lens=jnp.full((num_seqs,), seq_len, jnp.int32),
        block_table=pages.reshape(num_seqs, pages_per_seq),
    )
