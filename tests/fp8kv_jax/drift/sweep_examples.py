"""Texts of known keys and values, and the real steps that a sweep must agree with."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv
from fp8kv_jax import counters
from fp8kv_jax.calibration import FROZEN
from fp8kv_jax.drift.trace import TraceShape, write_trace

# K of layer 0 and V of layer 26 of Qwen2.5-Coder-1.5B as a one-layer cache.
SLICE = (
    pathlib.Path(__file__).parents[1] / "data" / "qwen2.5-coder_kv_slice.safetensors"
)
SHAPE = TraceShape(num_layers=2, num_kv_heads=2, head_dim=16)


def random_rows(num_tokens, seed, *, shape=SHAPE, spread=2.0):
    """BF16 rows whose magnitudes range widely from token to token."""
    rng = np.random.default_rng(seed)
    size = (shape.num_layers, num_tokens, shape.num_kv_heads, shape.head_dim)
    loud = np.exp(rng.normal(0, spread, (1, num_tokens, shape.num_kv_heads, 1)))
    return (rng.normal(size=size) * loud).astype(jnp.bfloat16)


def write_random(path, lengths, *, seed=0, shape=SHAPE, spread=2.0):
    """Writes a trace of random texts; returns K and V by name."""
    rows = {
        name: (
            random_rows(n, [seed, i, 0], shape=shape, spread=spread),
            random_rows(n, [seed, i, 1], shape=shape, spread=spread),
        )
        for i, (name, n) in enumerate(lengths.items())
    }
    ids = {name: np.arange(n, dtype=np.int32) for name, n in lengths.items()}
    write_trace(path, ids, rows.values(), shape=shape)
    return rows


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _write(cache, state, batch, k, v):
    step = fp8kv.begin_step(cache, state, batch)
    for layer in range(cache.num_layers):
        _, step = fp8kv.attend(step, layer, k[layer], k[layer], v[layer])
    return fp8kv.end_step(step)


def run_real_steps(texts, *, chunk, **calibration):
    """Writes texts through the real steps; returns the state at the end.

    Args:
      texts: of 192 tokens at most, K and V of each, `[num_layers, num_tokens,
        num_kv_heads, head_dim]`.
      chunk: tokens of the largest batch; a text's end ends one.
      calibration: of `CalibrationConfig`.
    """
    layers, _, heads, dim = texts[0][0].shape
    config = fp8kv.CacheConfig(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        num_pages=3,
        page_size=64,
    )
    cache = fp8kv.init_cache(config)
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(**calibration),
        config,
        max_tokens_per_step=chunk,
        num_window_rows=192,  # so that all windows share one compilation
    )
    slot = 0
    for k, v in texts:
        for start in range(0, k.shape[1], chunk):
            parts = [x[:, start : start + chunk] for x in (k, v)]
            num = parts[0].shape[1]
            padding = [(0, 0), (0, chunk - num), (0, 0), (0, 0)]
            rows = [jnp.asarray(np.pad(x, padding))[:, None] for x in parts]
            slots = np.where(np.arange(chunk) < num, slot + np.arange(chunk), -1)
            batch = fp8kv.Batch(
                token_ids=jnp.zeros((1, chunk), jnp.int32),
                slot_mapping=jnp.asarray(slots, jnp.int32)[None],
                query_starts=jnp.array([slot], jnp.int32),
                seq_lens=jnp.array([slot + num], jnp.int32),
                block_table=jnp.arange(config.num_pages, dtype=jnp.int32)[None],
            )
            cache, state = _write(cache, state, batch, *rows)
            slot += num
    return state


def saturated_after_freeze(state):
    """Values saturated at the frozen scales: [2, num_layers], K and V."""
    return np.stack(
        [
            counters.total(tally.saturated)[FROZEN].sum(axis=1)
            for tally in (state.k_tally, state.v_tally)
        ]
    )
