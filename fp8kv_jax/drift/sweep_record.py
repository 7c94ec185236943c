"""Records keys and values of texts from a full-precision model, for a trace."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.trace import Rows
from fp8kv_jax.scales.sample_plan import bucket_lengths

type Attend = Callable[..., tuple[Array, Any]]
# Keys and values of the layers so far.
type Recorded = tuple[tuple[Array, Array], ...]


def recording(attend: Attend) -> Attend:
    """Wraps an attention without a cache so that K and V gather in its carry.

    They are rounded to BF16, as the cache stores them; what the wrapped attention
    sees is not.
    """

    def record(
        carry: Recorded,
        layer: int,
        q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
        k: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
        v: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
        **options: Any,
    ) -> tuple[Array, Recorded]:
        out, _ = attend(None, layer, q, k, v, **options)
        return out, (*carry, (k[0].astype(jnp.bfloat16), v[0].astype(jnp.bfloat16)))

    return record


def record_rows(
    forward: Forward,
    params: Any,
    attend: Attend,
    texts: Sequence[Int32[np.ndarray, "num_tokens"]],
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[Rows, Rows]]:
    """Runs texts through a model, one at a time, each from its own beginning.

    Args:
      forward: the model.
      params: its parameters.
      attend: its attention without a cache.
      texts: token ids, none empty; padded to one of four lengths, so that there are
        as many compilations at most.
      advance: told how many tokens were recorded.
    """
    record = recording(attend)

    @jax.jit
    def run(params: Any, token_ids: Int32[Array, "1 length"]) -> tuple[Array, Array]:
        positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        at = jnp.zeros(1, jnp.int32)  # nobody reads the logits
        _, layers = forward(params, token_ids, positions, record, (), logits_at=at)
        k, v = zip(*layers, strict=True)
        return jnp.stack(k), jnp.stack(v)

    lengths = bucket_lengths(max(map(len, texts)))
    for ids in texts:
        padded = np.zeros((1, next(n for n in lengths if n >= len(ids))), np.int32)
        padded[0, : len(ids)] = ids
        k, v = jax.device_get(run(params, padded))
        yield k[:, : len(ids)], v[:, : len(ids)]
        advance(len(ids))
