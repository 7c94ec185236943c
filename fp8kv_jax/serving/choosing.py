"""The next token of each row, with the settings of its own request."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

from fp8kv_jax.sampling import draw, greedy
from fp8kv_jax.serving.request import MAX_LOGPROBS


class Choice(NamedTuple):
    """What a step has to do to choose: all rows get the dearest that one asks for."""

    draws: bool = False
    nucleus: bool = False
    logprobs: bool = False


class Rows(NamedTuple):
    """Settings of each row of logits; anything where nothing is chosen."""

    seeds: UInt32[Array | np.ndarray, "num_rows"]
    indices: Int32[Array | np.ndarray, "num_rows"]
    positions: Int32[Array | np.ndarray, "num_rows"]
    temperatures: Float32[Array | np.ndarray, "num_rows"]
    top_ps: Float32[Array | np.ndarray, "num_rows"]


class Chosen(NamedTuple):
    """What was chosen; log-probabilities only if asked for."""

    token_ids: Int32[Array, "width"]
    logprobs: Float32[Array, "num_rows"] | None = None
    top_ids: Int32[Array, "num_rows top"] | None = None
    top_logprobs: Float32[Array, "num_rows top"] | None = None


@functools.partial(jax.jit, static_argnames=("choice", "width"))
def choose(
    logits: Float[Array, "num_rows vocab_size"],
    rows: Rows,
    *,
    choice: Choice,
    width: int = 0,
) -> Chosen:
    """Chooses a token for each row.

    A draw depends on the request's seed, on the continuation's index and on the
    token's position alone. What other rows ask for changes how much is computed, not
    what comes out: temperature 0 stays greedy and top_p 1 keeps every token.

    Args:
      logits: one row for each sequence.
      rows: settings of each row.
      choice: what at least one row needs.
      width: rows of the token ids that come back, if more: one shape for all steps.
    """
    token_ids = greedy(logits)
    if choice.draws:
        drawn = draw(
            logits,
            jax.vmap(_key)(rows.seeds, rows.indices, rows.positions),
            temperature=jnp.asarray(rows.temperatures),
            top_p=jnp.asarray(rows.top_ps) if choice.nucleus else None,
        )
        token_ids = jnp.where(rows.temperatures > 0, drawn, token_ids)
    padded = jnp.pad(token_ids, (0, max(0, width - token_ids.size)))
    if not choice.logprobs:
        return Chosen(padded)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    own = jnp.take_along_axis(logprobs, token_ids[:, None], axis=-1)[:, 0]
    top = min(MAX_LOGPROBS, logits.shape[-1])
    top_logprobs, top_ids = jax.lax.top_k(logprobs, top)
    return Chosen(padded, own, top_ids.astype(jnp.int32), top_logprobs)


def _key(seed: Any, index: Any, position: Any) -> Array:
    """The key that `sample` gives sequence `index` of a run with this seed."""
    key = jax.random.fold_in(jax.random.key(seed), index)
    return jax.random.fold_in(key, position)
