"""Copying and gathering pages in plain jnp: the definition, and the fallback."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.pages.layout import (
    KPages,
    VPages,
    as_bits,
    as_floats,
    from_bits,
)

type Dense = Shaped[Array, "num_seqs tokens_per_seq num_kv_heads head_dim"]


def copy_pages(
    k_pages: KPages,
    v_pages: VPages,
    sources: Int[Array, "num_copies"],
    destinations: Int[Array, "num_copies"],
) -> tuple[KPages, VPages]:
    """Copies pages as integers, so that every code, NaN too, arrives bit for bit."""
    skipped = (sources < 0) | (destinations < 0)
    # JAX wraps -1 to the last page even with mode="drop": send it past the end.
    destinations = jnp.where(skipped, k_pages.shape[0], destinations)
    sources = jnp.where(skipped, 0, sources)

    def copy(pages: Array) -> Array:
        bits = as_bits(pages)
        moved = bits.at[destinations].set(bits[sources], mode="drop")
        return from_bits(moved, pages.dtype)

    return copy(k_pages), copy(v_pages)


def gather_sequences(
    k_pages: KPages, v_pages: VPages, block_table: Int[Array, "num_seqs pages_per_seq"]
) -> tuple[Dense, Dense]:
    """Gathers whole pages and turns both layouts token-major."""
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    num_seqs, pages_per_seq = block_table.shape
    dense = (num_seqs, pages_per_seq * page_size, num_kv_heads, head_dim)
    table = jnp.clip(block_table, 0, num_pages - 1)
    # [seq, page, head, token, dim] and [seq, page, head, dim, token]
    k = as_bits(k_pages)[table].transpose(0, 1, 3, 2, 4).reshape(dense)
    v = as_bits(v_pages)[table].transpose(0, 1, 4, 2, 3).reshape(dense)
    return as_floats(k, k_pages.dtype), as_floats(v, v_pages.dtype)
