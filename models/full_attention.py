"""Attention without a cache: the batch attends to itself, causally."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.layers import matmul_precision, soft_cap


def full_attention[Carry](
    carry: Carry,
    layer_index: int,
    q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    k: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    v: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    *,
    softmax_scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> tuple[Float[Array, "num_seqs num_queries num_q_heads head_dim"], Carry]:
    """Attends from each query to itself and to the queries before it in its row.

    The full-precision reference: nothing is cached, rounded or dropped. Rows padded
    at their end are right, since no query looks ahead; the padding's own outputs mean
    nothing. Scores and softmax are float32.

    Args:
      carry: returned as it came.
      layer_index: ignored.
      q: queries, after the rotary embedding.
      k: keys, after the rotary embedding.
      v: values.
      softmax_scale: factor on q . k.
      sliding_window: how many of the newest tokens a query sees, itself included.
      logit_soft_cap: c of `c * tanh(score / c)`, or None.

    Returns:
      The attention output in q's dtype, and the carry.
    """
    del layer_index
    num_seqs, num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    precision = matmul_precision(q.dtype)
    grouped = q.reshape(
        num_seqs, num_queries, num_kv_heads, num_q_heads // num_kv_heads, head_dim
    )
    scores = jnp.einsum(
        "sqhgd,skhd->shgqk",
        grouped,
        k,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scores = soft_cap(scores * softmax_scale, logit_soft_cap)
    visible = _visible(num_queries, sliding_window)[None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    out = jnp.einsum(
        "shgqk,skhd->sqhgd",
        weights,
        v.astype(jnp.float32),
        precision=matmul_precision(jnp.float32),
    )
    return out.reshape(q.shape).astype(q.dtype), carry


def _visible(num_queries: int, sliding_window: int | None) -> jax.Array:
    index = jnp.arange(num_queries)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    return visible if sliding_window is None else visible & (distance < sliding_window)
