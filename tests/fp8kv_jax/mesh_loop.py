"""A loop over given rows that is the same on one device and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fp8kv_jax as fp8kv

NUM_LAYERS, NUM_Q_HEADS, HEAD_DIM = 2, 8, 16
NUM_SEQS, NUM_QUERIES, PAGE_SIZE = 4, 5, 8
# Pages of a sequence: a run of its own, so that any stretch of pages holds whole ones.
OWN_PAGES = 4
NUM_PAGES = NUM_SEQS * OWN_PAGES
WINDOW, NUM_STEPS = 45, 6


def make_loop(num_kv_heads, granularity="tensor", telemetry=False):
    """Functions that make the cache and the state."""
    config = fp8kv.CacheConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )
    # So small a provisional scale saturates: the counters have something to count.
    calibration = fp8kv.CalibrationConfig(
        window_tokens=WINDOW, granularity=granularity, provisional_scale=0.01
    )
    state = functools.partial(
        fp8kv.init_calibration,
        calibration,
        config,
        max_tokens_per_step=NUM_SEQS * NUM_QUERIES,
        telemetry=telemetry,
    )
    return functools.partial(fp8kv.init_cache, config), state


def make_rows(step, num_kv_heads):
    """q, k and v of a step: a NaN, an Inf, and heads of distinct sizes."""
    rng = np.random.default_rng(step)

    def rows(num_heads):
        shape = (NUM_LAYERS, NUM_SEQS, NUM_QUERIES, num_heads, HEAD_DIM)
        x = rng.normal(0, 2.0, shape) * (1 + np.arange(num_heads))[:, None]
        return x.astype(jnp.bfloat16)

    q, k, v = rows(NUM_Q_HEADS), rows(num_kv_heads), rows(num_kv_heads)
    # In the first layer and in the last.
    k[0, 1, 1, -1, 3], v[-1, 2, 0, 0, 5] = np.nan, np.inf
    return q, k, v


def make_batch(step, starts):
    """Up to five new tokens of each sequence; one slot is past the pool."""
    width = NUM_QUERIES if step % 2 == 0 else 2
    table = np.arange(NUM_PAGES, dtype=np.int32).reshape(NUM_SEQS, OWN_PAGES)
    positions = starts + np.arange(NUM_QUERIES)
    slots = table[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    slots[:, width:] = -1
    if step == 3:
        slots[0, 1] = NUM_PAGES * PAGE_SIZE
    # Inside the window: the last page of a sequence gets a copy of its first.
    copies = [[OWN_PAGES, 2 * OWN_PAGES - 1] if step == 2 else [-1, -1], [-1, -1]]
    arrays = {
        "token_ids": np.zeros((NUM_SEQS, NUM_QUERIES)),
        "slot_mapping": slots,
        "query_starts": np.full(NUM_SEQS, starts),
        "seq_lens": np.full(NUM_SEQS, starts + width),
        "block_table": table,
        "page_copies": np.array(copies),
    }
    batch = fp8kv.Batch(**{k: np.asarray(x, np.int32) for k, x in arrays.items()})
    return batch, starts + width


def make_write(placement=None, implementation=None):
    """Makes the step: (cache, state, batch, q, k, v) -> (outputs, cache, state)."""
    options = {"implementation": implementation}

    def write(cache, state, batch, q, k, v):
        step = fp8kv.begin_step(cache, state, batch, placement=placement, **options)
        outs = []
        for layer in range(NUM_LAYERS):
            out, step = fp8kv.attend(
                step, layer, q[layer], k[layer], v[layer], **options
            )
            outs.append(out)
        return jnp.stack(outs), *fp8kv.end_step(step, **options)

    return write


def run(
    num_kv_heads,
    granularity="tensor",
    placement=None,
    implementation=None,
    telemetry=False,
):
    """Writes all steps; returns outputs, cache, state and how often it compiled."""
    make_cache, make_state = make_loop(num_kv_heads, granularity, telemetry)
    write = jax.jit(make_write(placement, implementation), donate_argnums=(0, 1))
    if placement is None:
        cache, state = make_cache(), make_state()
    else:
        cache, state = placement.make(make_cache), placement.make(make_state)
    outs, frozen, starts = [], [], 0
    for step in range(NUM_STEPS):
        batch, starts = make_batch(step, starts)
        rows = make_rows(step, num_kv_heads)
        if placement is not None:
            batch = placement.put(batch)
            rows = [placement.put_replicated(x) for x in rows]
        out, cache, state = write(cache, state, batch, *rows)
        outs.append(out)
        frozen.append(bool(state.frozen))
    return {
        "outs": outs,
        "cache": cache,
        "state": state,
        "frozen": frozen,
        "compilations": write._cache_size(),
    }
