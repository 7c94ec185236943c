"""The promise on a real model: pools against the BF16 rows that it gave to append."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8kv_jax as fp8kv
from models.loading import default_model_path, load_model

sys.path.insert(0, str(pathlib.Path(__file__).parent / "fp8kv_jax"))
from oracle import SlotOracle

TEXT = (
    "A key that is written at one scale and read at another is not a key. The window "
    "is what keeps both the same: its rows wait beside the cache until the scale is "
    "known, and are written again. Whoever reads later, from any page, in any order, "
    "then finds one scale for the whole history, and every byte as if it had been "
    "written once, at that scale, from the row that the model gave."
)
WINDOW, CHUNK, PAGE_SIZE = 64, 16, 16


def recording(forward):
    """A forward function that returns the rows handed to `attend` with its logits."""

    def wrapped(params, token_ids, positions, attend, carry, *, logits_at=None):
        rows = []

        def record(carry, layer, q, k, v, **options):
            rows.append(jnp.stack([k, v]))
            return attend(carry, layer, q, k, v, **options)

        logits, carry = forward(
            params, token_ids, positions, record, carry, logits_at=logits_at
        )
        return (logits, jnp.stack(rows)), carry

    return wrapped


@pytest.fixture(scope="module")
def model():
    return load_model(default_model_path(), "float32")


@pytest.fixture(scope="module")
def step(model):
    """Compiles once for several tests: that takes most of their time."""
    step = fp8kv.make_steps(recording(model.forward)).prefill_step
    return jax.jit(step, donate_argnums=(1, 2))


def cache_config(model):
    return fp8kv.CacheConfig(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        num_pages=8,
        page_size=PAGE_SIZE,
    )


def chunks_of(step, params, config, ids, granularity):
    """Runs the steps of one sequence; yields batch, rows, cache and state of each."""
    cache = fp8kv.init_cache(config)
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(window_tokens=WINDOW, granularity=granularity),
        config,
        max_tokens_per_step=CHUNK,
    )
    table = fp8kv.BlockTable(
        num_pages=8, page_size=PAGE_SIZE, num_seqs=1, max_seq_len=128
    )
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        batch = fp8kv.make_batch(table, {0: chunk}, {0: start}, num_queries=CHUNK)
        (_, rows), cache, state = step(params, cache, state, batch)
        yield batch, rows, cache, state


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_pools_of_a_real_model_equal_one_shot_quantization(model, step, granularity):
    config = cache_config(model)
    oracle = SlotOracle(
        config.num_layers, config.num_slots, config.num_kv_heads, config.head_dim
    )
    ids = model.tokenizer.encode(TEXT)
    was_frozen = [False]
    steps = chunks_of(step, model.params, config, ids, granularity)
    for batch, rows, cache, state in steps:
        slots = np.asarray(batch.slot_mapping).reshape(-1)
        oracle.append(slots, np.asarray(rows)[:, :, 0], observe=not was_frozen[-1])
        was_frozen.append(bool(state.frozen))
        assert oracle.differing_bytes(cache, state) == 0
    assert len(ids) > WINDOW + CHUNK
    assert int(state.tokens_seen) == int(state.num_requantized) == WINDOW
    assert was_frozen[: WINDOW // CHUNK + 1] == [False] * (WINDOW // CHUNK) + [True]


def test_a_nudged_model_freezes_on_nearly_the_same_scales(model, step):
    """What P7 can promise for a whole model: flipped codes spread over the layers."""
    ids = model.tokenizer.encode(TEXT)[:WINDOW]
    scales = []
    for nudge in (1, 1 + 1e-6):
        params = {**model.params, "embedding": model.params["embedding"] * nudge}
        *_, (*_, state) = chunks_of(step, params, cache_config(model), ids, "head")
        assert bool(state.frozen)
        scales.append(np.stack([state.k_scale, state.v_scale]))
    change = np.abs(scales[1] / scales[0] - 1)
    assert np.median(change) < 1e-3
    assert np.quantile(change, 0.95) < 0.02
    assert 0 < change.max() < 0.08


def test_log_probabilities_through_a_wide_cache_equal_the_reference(model):
    """What `--dtype float32 --kv-cache-dtype auto` computes, in chunks of 64."""
    data = pathlib.Path(__file__).parent / "models/data/smollm2_reference.npz"
    config = fp8kv.CacheConfig(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        num_pages=2,
        dtype="float32",
    )
    step = jax.jit(fp8kv.make_steps(model.forward).score_step, donate_argnums=(1, 2))
    with np.load(data) as reference:
        for name in ("english", "code", "chinese", "symbols"):
            ids = reference[f"{name}.ids"].tolist()
            table = fp8kv.BlockTable(
                num_pages=2, page_size=128, num_seqs=1, max_seq_len=256
            )
            cache = fp8kv.init_cache(config)
            state = fp8kv.init_calibration(
                fp8kv.CalibrationConfig(), config, max_tokens_per_step=64
            )
            found = []
            for start in range(0, len(ids), 64):
                chunk = ids[start : start + 64]
                batch = fp8kv.make_batch(table, {0: chunk}, {0: start}, num_queries=64)
                logits, cache, state = step(model.params, cache, state, batch)
                found.append(jax.nn.log_softmax(logits[0, : len(chunk)], axis=-1))
            top = reference[f"{name}.top_ids"]
            found = np.take_along_axis(np.concatenate(found), top, axis=-1)
            np.testing.assert_allclose(
                found, reference[f"{name}.top_logprobs"], atol=2e-4
            )
