"""A random model in which faults can be planted, and what replays of it start from."""

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from fp8kv_jax.drift.replay import ReplayConfig, ReplaySequence
from fp8kv_jax.drift.workload import Tally
from fp8kv_jax.drift.workload_slices import make_slices
from fp8kv_jax.scales.scale_set import ScaleSet

NUM_LAYERS, NUM_KV_HEADS, NUM_Q_HEADS, HEAD_DIM, VOCAB = 4, 2, 4, 8, 48
HIDDEN = NUM_Q_HEADS * HEAD_DIM
# A token whose values can be made huge; random texts do not hold it.
LOUD_TOKEN = VOCAB - 1
MAX_TOKENS = 96


def init_params(seed=0):
    """Random weights; `k_gain` and `v_gain` are by layer and KV head."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))

    def normal(*shape, scale=HIDDEN**-0.5):
        return scale * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(VOCAB, HIDDEN, scale=1.0),
        "q": normal(NUM_LAYERS, HIDDEN, NUM_Q_HEADS, HEAD_DIM),
        "k": normal(NUM_LAYERS, HIDDEN, NUM_KV_HEADS, HEAD_DIM),
        "v": normal(NUM_LAYERS, HIDDEN, NUM_KV_HEADS, HEAD_DIM),
        "k_gain": jnp.ones((NUM_LAYERS, NUM_KV_HEADS)),
        "v_gain": jnp.ones((NUM_LAYERS, NUM_KV_HEADS)),
        "loud": jnp.zeros((NUM_LAYERS, NUM_KV_HEADS)),
    }


def rows_of(params, layer, x, token_ids):
    q, k, v = (jnp.einsum("sqd,dhk->sqhk", x, params[n][layer]) for n in "qkv")
    k = k * params["k_gain"][layer][None, None, :, None]
    v = v * params["v_gain"][layer][None, None, :, None]
    is_loud = (token_ids == LOUD_TOKEN).astype(jnp.float32)[..., None]
    loud = is_loud * params["loud"][layer][None, None]
    return q, k, v + loud[..., None]


def forward(params, token_ids, positions, attend, carry, *, logits_at=None):
    """The model as `fp8kv_jax.decode.Forward`."""
    x = params["embedding"][token_ids]
    x = x + 0.1 * jnp.sin(positions.astype(jnp.float32))[..., None]
    for layer in range(NUM_LAYERS):
        q, k, v = rows_of(params, layer, x, token_ids)
        out, carry = attend(carry, layer, q, k, v)
        x = x + out.reshape(x.shape)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    if logits_at is not None:
        x = x[jnp.arange(x.shape[0]), logits_at]
    return x @ params["embedding"].T, carry


def record_rows(params, token_ids):
    """K and V of one text from the model itself: `[2, layers, tokens, heads, dim]`."""
    ids = np.zeros((1, MAX_TOKENS), np.int32)
    ids[0, : len(token_ids)] = token_ids
    rows, logits = _record(params, ids)
    return np.asarray(rows[:, :, : len(token_ids)]), np.asarray(
        logits[: len(token_ids)]
    )


@jax.jit
def _record(params, ids):
    def attend(rows, layer, q, k, v):
        group = NUM_Q_HEADS // NUM_KV_HEADS
        scores = jnp.einsum("qhd,khd->hqk", q[0], jnp.repeat(k[0], group, axis=1))
        mask = jnp.tril(jnp.ones(scores.shape[1:], bool))[None]
        weights = jax.nn.softmax(jnp.where(mask, scores * HEAD_DIM**-0.5, -jnp.inf))
        out = jnp.einsum("hqk,khd->qhd", weights, jnp.repeat(v[0], group, axis=1))
        return out[None], (*rows, jnp.stack([k[0], v[0]]))

    positions = jnp.arange(ids.shape[1])[None]
    logits, rows = forward(params, ids, positions, attend, ())
    return jnp.stack(rows, axis=1), logits[0]


def texts(number, *, seed=0, longest=MAX_TOKENS, loud=False):
    """Sequences of random tokens, of two classes and two languages in turn."""
    rng = np.random.default_rng(seed)
    result = []
    for index in range(number):
        ids = rng.integers(0, LOUD_TOKEN, int(rng.integers(8, longest))).tolist()
        if loud and index == 0:
            ids[5] = LOUD_TOKEN
        result.append(
            ReplaySequence(
                name=f"text {index}",
                token_ids=ids,
                prompt_length=len(ids),
                data_class="code" if index % 2 else "chat",
                language="zh" if index % 3 else "en",
            )
        )
    return result


def slices_of(*, max_new_tokens=0):
    """Slices that serve all of `texts`, so that one shape is compiled."""
    lengths = np.zeros(MAX_TOKENS + 1, np.int64)
    lengths[[16, 48, 64, MAX_TOKENS]] = 1
    counts = {"classes": {"chat": [2, 1], "code": [2, 1]}}
    tally = Tally(lengths=lengths, languages={"en": [2, 1], "zh": [2, 1]}, **counts)
    return make_slices(tally, max_new_tokens=max_new_tokens)


def calibrate(params, *, granularity="head", headroom=2.0, seed=99, number=30):
    """Scales from other texts of the same kind."""
    found = [record_rows(params, s.token_ids)[0] for s in texts(number, seed=seed)]
    amax = np.max([np.abs(rows).max(axis=(2, 4)) for rows in found], axis=0)
    return scales_from(amax, granularity=granularity, headroom=headroom)


def scales_from(amax, *, granularity="head", headroom=2.0):
    if granularity == "tensor":
        amax = amax.max(axis=2, keepdims=True)
    amax = amax.astype(np.float32)
    k, v = amax * np.float32(headroom / 448)
    return ScaleSet(
        layers=tuple(range(NUM_LAYERS)),
        granularity=granularity,
        k_scale=k,
        v_scale=v,
        k_inv_scale=np.float32(1) / k,
        v_inv_scale=np.float32(1) / v,
        k_amax=amax[0],
        v_amax=amax[1],
    )


def cache_config(**changes):
    fields = {
        "num_layers": NUM_LAYERS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_pages": 1,
        "page_size": 8,
        "high_precision_dtype": "float32",
    }
    return fp8kv.CacheConfig(**(fields | changes))


def replay_config(**changes):
    fields = {
        "cache": cache_config(),
        "wide_dtype": "float32",
        "max_tokens": MAX_TOKENS,
        "tokens_per_step": 256,
        "num_worst": 5,
    }
    return ReplayConfig(**(fields | changes))
