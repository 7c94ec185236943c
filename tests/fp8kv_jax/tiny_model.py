"""A random model of two layers, small enough to compile in a second."""

import functools

import jax
import jax.numpy as jnp

import fp8kv_jax as fp8kv

NUM_LAYERS, NUM_KV_HEADS, NUM_Q_HEADS, HEAD_DIM, VOCAB = 2, 2, 4, 16, 64
HIDDEN = NUM_Q_HEADS * HEAD_DIM
# Tokens whose keys and values hold what must never enter a scale.
NAN_TOKEN, INF_TOKEN, NEGATIVE_INF_TOKEN = 0, 1, 2


def init_params(seed: int = 0, *, planted: bool = False) -> dict[str, jax.Array]:
    """Random weights; with `planted`, three tokens carry NaN or Inf in K and V."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))

    def normal(*shape: int, scale: float = HIDDEN**-0.5) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    extra = jnp.zeros((VOCAB,))
    if planted:
        values = [jnp.nan, jnp.inf, -jnp.inf]
        at = jnp.array([NAN_TOKEN, INF_TOKEN, NEGATIVE_INF_TOKEN])
        extra = extra.at[at].set(jnp.array(values))
    return {
        "embedding": normal(VOCAB, HIDDEN, scale=1.0),
        "q": normal(NUM_LAYERS, HIDDEN, NUM_Q_HEADS, HEAD_DIM),
        "k": 8 * normal(NUM_LAYERS, HIDDEN, NUM_KV_HEADS, HEAD_DIM),
        "v": normal(NUM_LAYERS, HIDDEN, NUM_KV_HEADS, HEAD_DIM),
        "planted": extra,
    }


def forward(params, token_ids, positions, attend, carry, *, logits_at=None):
    """The model as `fp8kv_jax.decode.Forward`; returns K and V beside the logits."""
    x = params["embedding"][token_ids]
    x = x + 0.1 * jnp.sin(positions.astype(jnp.float32))[..., None]
    rows = []
    for layer in range(NUM_LAYERS):
        q, k, v = (
            jnp.einsum("sqd,dhk->sqhk", x, params[name][layer]) for name in "qkv"
        )
        # A token of its own kind each: element 3 of head 1 is NaN or Inf.
        k = k.at[:, :, 1, 3].add(params["planted"][token_ids])
        v = v.at[:, :, 1, 3].add(params["planted"][token_ids])
        rows.append((k, v))
        out, carry = attend(
            carry,
            layer,
            q,
            k,
            v,
            softmax_scale=None,
            sliding_window=None,
            logit_soft_cap=None,
        )
        x = x + jnp.nan_to_num(out.reshape(x.shape))
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    if logits_at is not None:
        x = x[jnp.arange(x.shape[0]), logits_at]
    return (x @ params["embedding"].T, rows), carry


def cache_config(**changes) -> fp8kv.CacheConfig:
    config = {
        "num_layers": NUM_LAYERS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_pages": 16,
        "page_size": 8,
    }
    return fp8kv.CacheConfig(**(config | changes))


@functools.cache
def jitted_steps() -> fp8kv.Steps:
    """The steps, jitted once for the whole test run."""
    steps = fp8kv.make_steps(forward)
    return fp8kv.Steps(*(jax.jit(step, donate_argnums=(1, 2)) for step in steps))
