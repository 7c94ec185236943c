"""Paged attention in plain jnp: its definition, and the fallback on any device."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pages.layout import KPages, VPages, as_bits, as_floats

# Floats that one step of a loop over sequences or queries may hold: 256 MiB of
# gathered keys or of logits. Everyday calls stay below it and run without a loop.
_MAX_FLOATS = 1 << 26


def paged_attention_reference(
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    k_pages: KPages,
    v_pages: VPages,
    block_table: Int[Array, "num_seqs pages_per_seq"],
    seq_lens: Int[Array, "num_seqs"],
    *,
    query_starts: Int[Array, "num_seqs"] | None,
    k_scale: Float[Array, "num_scales"] | None,
    v_scale: Float[Array, "num_scales"] | None,
    softmax_scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> Float[Array, "num_seqs num_queries num_q_heads head_dim"]:
    """Computes paged attention in float32, for any page size and pool dtype.

    Arguments as in `paged_attention`, with scales of one value or one per KV head.
    Keys and values are gathered once, as codes, and heads that share a KV head
    share its rows. Sequences, and then queries, go one after the other where all
    at once would need more than `_MAX_FLOATS`.
    """
    num_seqs, num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group_size = num_q_heads // num_kv_heads
    seq_lens = jnp.clip(seq_lens, 0, block_table.shape[1] * page_size)
    if query_starts is None:
        query_starts = seq_lens - num_queries
    per_head = (num_kv_heads, 1, 1)
    # [heads, 1, 1], so that it meets [heads, rows, tokens] and [heads, rows, dim].
    logit_scale = jnp.full(per_head, softmax_scale, jnp.float32)
    if k_scale is not None:
        logit_scale = logit_scale * k_scale.reshape(-1, 1, 1)

    def one_sequence(args):
        q, table, seq_len, start = args
        k, v = _gather(k_pages, v_pages, table)
        token = jnp.arange(k.shape[1], dtype=jnp.int32)
        live = (token < seq_len) & (token < start + num_queries)
        if sliding_window is not None:
            live &= token > start - sliding_window
        # A dead slot may hold NaN, and 0 * NaN is NaN.
        v = jnp.where(live[None, None, :], v, 0.0)

        def some_queries(args):
            q, position = args
            rows = q.astype(jnp.float32).reshape(-1, num_kv_heads, group_size, head_dim)
            rows = rows.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
            visible = _visible(token, position, seq_len, sliding_window)
            visible = jnp.repeat(visible, group_size, axis=0)
            out = _attend(rows, k, v, visible, logit_scale, logit_soft_cap)
            out = out.reshape(num_kv_heads, -1, group_size, head_dim)
            return out.swapaxes(0, 1).reshape(q.shape)

        position = start + jnp.arange(num_queries, dtype=jnp.int32)
        at_once = max(1, _MAX_FLOATS // (num_q_heads * k.shape[1]))
        return _map(some_queries, (q, position), num_queries, at_once)

    context = block_table.shape[1] * page_size
    floats = num_kv_heads * context * head_dim + num_queries * num_q_heads * context
    at_once = max(1, _MAX_FLOATS // max(1, floats))
    args = (q, block_table, seq_lens, query_starts)
    out = _map(jax.vmap(one_sequence), args, num_seqs, at_once)
    if v_scale is not None:
        v_scale = jnp.broadcast_to(v_scale, (num_kv_heads,))
        out = out * jnp.repeat(v_scale, group_size)[None, None, :, None]
    return out.astype(q.dtype)


def _gather(
    k_pages: KPages, v_pages: VPages, table: Int[Array, "pages_per_seq"]
) -> tuple[
    Float[Array, "num_kv_heads context head_dim"],
    Float[Array, "num_kv_heads head_dim context"],
]:
    """Gathers the pages of a sequence and widens them; garbage entries are clamped."""
    num_pages, num_kv_heads, _, head_dim = k_pages.shape
    table = jnp.clip(table, 0, num_pages - 1)
    # As integers: XLA on the CPU widens a whole FP8 pool to gather from it.
    k = jnp.moveaxis(as_bits(k_pages)[table], 0, 1)
    v = jnp.moveaxis(as_bits(v_pages)[table], 0, 2)
    k = k.reshape(num_kv_heads, -1, head_dim)
    v = v.reshape(num_kv_heads, head_dim, -1)
    return _widen(k, k_pages.dtype), _widen(v, v_pages.dtype)


def _widen(bits: Int[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    return as_floats(bits, dtype).astype(jnp.float32)


def _visible(
    token: Int[Array, "context"],
    position: Int[Array, "num_queries"],
    seq_len: Int[Array, ""],
    sliding_window: int | None,
) -> Bool[Array, "num_queries context"]:
    """Says which token each query sees: none, if its position holds no token."""
    token, position = token[None, :], position[:, None]
    visible = (token <= position) & (token < seq_len) & (position < seq_len)
    if sliding_window is not None:
        visible &= token > position - sliding_window
    return visible


def _attend(
    q: Float[Array, "num_kv_heads rows head_dim"],
    k: Float[Array, "num_kv_heads context head_dim"],
    v: Float[Array, "num_kv_heads head_dim context"],
    visible: Bool[Array, "rows context"],
    logit_scale: Float[Array, "num_kv_heads 1 1"],
    logit_soft_cap: float | None,
) -> Float[Array, "num_kv_heads rows head_dim"]:
    """Computes softmax attention; a row that sees nothing gives zeros."""
    logits = jnp.einsum("hrd,htd->hrt", q, k, precision="highest") * logit_scale
    if logit_soft_cap is not None:
        logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
    logits = jnp.where(visible[None], logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("hrt,hdt->hrd", weights, v, precision="highest")
    sees_some = jnp.any(visible, axis=-1)[None, :, None]
    return jnp.where(sees_some, out / total, 0.0)


def _map(f, args, size: int, at_once: int):
    """Applies `f`, which takes a leading axis, to at most `at_once` of it at a time."""
    if size <= at_once:
        return f(args)
    num_blocks = -(-size // at_once)
    pad = num_blocks * at_once - size

    def blocks(x):
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(num_blocks, at_once, *x.shape[1:])

    out = lax.map(f, jax.tree.map(blocks, args))
    return out.reshape(num_blocks * at_once, *out.shape[2:])[:size]
