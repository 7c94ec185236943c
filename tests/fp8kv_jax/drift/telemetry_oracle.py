"""A plain numpy count of what telemetry counts, and a model whose rows are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from fp8kv_jax.drift import telemetry

MAX_LAYERS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 3, 2, 64, 40
QUIET = 4
COUNTS = ("saturated", "saturated_tokens", "underflowed", "nonfinite", "histogram")


def count_rows(rows, inv_scale):
    """Counts float32 rows [num_tokens, head_dim] of one head, as a dict."""
    rows = np.where(np.abs(rows) < 2.0**-126, np.float32(0), rows)
    finite = np.isfinite(rows)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = np.abs(rows * np.float32(inv_scale))
    saturated = finite & (y > 464)
    edges = [2.0**-10, *(448 * 2.0**k for k in range(-18, 4)), np.inf]
    histogram = np.zeros(len(edges), np.int64)
    for value in y[finite]:
        histogram[next(i for i, edge in enumerate(edges) if value <= edge)] += 1
    return {
        "amax": np.max(np.abs(rows[finite]), initial=np.float32(0)),
        "saturated": saturated.sum(),
        "saturated_tokens": saturated.any(axis=1).sum(),
        "underflowed": (finite & (rows != 0) & (y <= 2.0**-10)).sum(),
        "nonfinite": (~finite).sum(),
        "histogram": histogram,
    }


def assert_reads(readings, row, rows, inv_scale):
    """Compares the readings of one layer with a count of its rows [tokens, heads, d]."""
    for head in range(rows.shape[1]):
        expected = count_rows(rows[:, head], inv_scale[head % len(inv_scale)])
        for name, value in expected.items():
            actual = getattr(readings, name)[row, head]
            np.testing.assert_array_equal(actual, value, err_msg=f"{name} {row} {head}")


@functools.cache
def params(seed=0):
    """Tables of q, k and v for each token id: what a token's rows are is known.

    Magnitudes spread over 2^-30 .. 2^10. Token 0 holds NaN, 1 Inf, 2 zeros, 3
    subnormals; QUIET is small, so that scales which froze on it are left by others.
    """
    rng = np.random.default_rng(seed)

    def table(heads):
        shape = MAX_LAYERS, VOCAB, heads, HEAD_DIM
        return rng.normal(0, 1, shape) * np.exp2(rng.uniform(-30, 10, shape))

    tables = {"q": rng.normal(0, 1, (MAX_LAYERS, VOCAB, NUM_KV_HEADS, HEAD_DIM))}
    for name in "kv":
        rows = table(NUM_KV_HEADS)
        rows[:, 0, 0, 3], rows[:, 1, 1, 5], rows[:, 1, 1, 6] = np.nan, np.inf, -np.inf
        rows[:, 2], rows[:, 3] = 0, 1e-40
        rows[:, QUIET] = rng.normal(0, 0.1, rows[:, QUIET].shape)
        tables[name] = rows
    tables["head"] = rng.normal(0, 1, (NUM_KV_HEADS * HEAD_DIM, VOCAB))
    return {
        name: jnp.asarray(x, jnp.float32 if name in "q head" else jnp.bfloat16)
        for name, x in tables.items()
    }


def rows_of(name, layer, token_ids):
    """K or V rows that tokens have, as float32 [num_tokens, heads, dim]."""
    table = np.asarray(params()[name]).astype(np.float32)
    return table[layer, np.asarray(token_ids)]


def forward(params, token_ids, positions, attend, carry, *, logits_at=None):
    """`fp8kv_jax.decode.Forward`, of layers that look their rows up."""
    x = jnp.zeros((*token_ids.shape, NUM_KV_HEADS * HEAD_DIM))
    options = {"softmax_scale": None, "sliding_window": None, "logit_soft_cap": None}
    for layer in range(carry.cache.num_layers):
        q, k, v = (params[name][layer][token_ids] for name in "qkv")
        out, carry = attend(carry, layer, q, k, v, **options)
        x = x + jnp.nan_to_num(out.reshape(x.shape))
    if logits_at is not None:
        x = x[jnp.arange(x.shape[0]), logits_at]
    return x @ params["head"], carry


def cache_config(**changes):
    sizes = {
        "num_layers": 2,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_pages": 8,
        "page_size": 8,
    }
    return fp8kv.CacheConfig(**(sizes | changes))


def make_batch(token_ids, slots, pages=8):
    """One sequence's new tokens; its history does not matter to what is counted."""
    token_ids, slots = (np.asarray(x, np.int32)[None] for x in (token_ids, slots))
    return fp8kv.Batch(
        token_ids=jnp.asarray(token_ids),
        slot_mapping=jnp.asarray(slots),
        query_starts=jnp.zeros(1, jnp.int32),
        seq_lens=jnp.full((1,), token_ids.size, jnp.int32),
        block_table=jnp.arange(pages, dtype=jnp.int32)[None],
    )


@functools.cache
def jitted_step(implementation=None):
    """One for all tests, so that states of one shape share a compilation."""
    made = fp8kv.make_steps(forward, implementation=implementation)
    return jax.jit(made.score_step, donate_argnums=(1, 2))


def init(config, *, max_tokens_per_step, on=True, **calibration):
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(**calibration),
        config,
        max_tokens_per_step=max_tokens_per_step,
        telemetry=on,
    )
    return fp8kv.init_cache(config), state


def summary(state):
    return telemetry.summarize(state.telemetry)
