"""Choosing the next token of each sequence from its logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Key

type Logits = Float[Array, "num_seqs vocab_size"]


def greedy(logits: Logits) -> Int32[Array, "num_seqs"]:
    """Chooses the likeliest token; the lowest id wins a tie."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Logits,
    sequences: Int32[Array, "num_seqs"],
    positions: Int32[Array, "num_seqs"],
    *,
    key: Key[Array, ""],
    temperature: Float32[Array, ""],
    top_p: Float32[Array, ""],
) -> Int32[Array, "num_seqs"]:
    """Draws a token from the likeliest ones that together reach `top_p`.

    The randomness of a token depends on the key, on its sequence and on its position,
    never on what else is in the batch.

    Args:
      logits: one row for each sequence.
      sequences: index of each row's sequence among the prompts.
      positions: position that the new token will have.
      key: what all draws of a run come from.
      temperature: divisor of the logits, > 0.
      top_p: share of the probability to keep, in (0, 1]. The likeliest token stays
        whatever it is.
    """

    def own_key(sequence: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, sequence), position)

    return draw(
        logits,
        jax.vmap(own_key)(sequences, positions),
        temperature=jnp.broadcast_to(temperature, sequences.shape),
        top_p=jnp.broadcast_to(top_p, sequences.shape),
    )


def draw(
    logits: Logits,
    keys: Key[Array, "num_seqs"],
    *,
    temperature: Float32[Array, "num_seqs"],
    top_p: Float32[Array, "num_seqs"] | None,
) -> Int32[Array, "num_seqs"]:
    """Draws a token for each row from the row's own key, as `sample` does for all.

    Args:
      logits: one row for each sequence.
      keys: what each draw comes from.
      temperature: divisor of the logits, > 0.
      top_p: see `sample`; None keeps all tokens, and sorts none.
    """
    logits = logits.astype(jnp.float32)
    # From the largest down, and never by 0: a tiny temperature is greedy, not NaN.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.maximum(temperature, 1e-30)[:, None]
    if top_p is not None:
        scaled = jnp.where(_nucleus(scaled, top_p[:, None]), scaled, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)


def _nucleus(
    logits: Float32[Array, "num_seqs vocab_size"], top_p: Float32[Array, "num_seqs 1"]
) -> Array:
    """Marks the fewest likeliest tokens whose probabilities add up to `top_p`."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    ordered = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    # Rounding can bring the sum to 1 before the last token: 1 means keep them all.
    kept = (before < top_p) | (top_p >= 1)
    kept = kept.at[:, 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(kept, rank, axis=-1)
