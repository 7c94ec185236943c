"""Telemetry inside the step: exact, of final scales alone, and nothing else changes."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import telemetry_oracle as oracle

import fp8kv_jax as fp8kv
from fp8kv_jax.drift import telemetry
from fp8kv_jax.generation import GenerationConfig, Generator
from fp8kv_jax.scales import ScaleSet

CHUNK, NUM_SLOTS = 16, 64


def random_batches(num, seed=0, chunk=CHUNK, num_slots=NUM_SLOTS):
    """(token ids, slots) with padding, slots past the pool and duplicates.

    The first batch is quiet: a window of 5 tokens freezes on it.
    """
    rng = np.random.default_rng(seed)
    for index in range(num):
        token_ids = rng.integers(0, oracle.VOCAB, chunk)
        if index == 0:
            token_ids[:] = oracle.QUIET
        slots = rng.integers(-1, num_slots, chunk)
        slots[: chunk // 4] = -1
        slots[-1], slots[-2] = slots[-3], num_slots + 5
        yield token_ids, slots


def real(token_ids, slots, num_slots=NUM_SLOTS):
    return token_ids[(slots >= 0) & (slots < num_slots)]


def init(config=None, **options):
    config = config or oracle.cache_config()
    return oracle.init(config, max_tokens_per_step=CHUNK, window_tokens=5, **options)


def run(batches, *, config=None, on=True, implementation=None, granularity="tensor"):
    """All batches through one jitted step; returns logits, cache, state, counted ids.

    `counted` are the real tokens of the steps that began with frozen scales.
    """
    cache, state = init(config, on=on, granularity=granularity)
    step = oracle.jitted_step(implementation)
    logits, counted = [], []
    for token_ids, slots in batches:
        if bool(state.frozen):
            counted.append(real(token_ids, slots))
        batch = oracle.make_batch(token_ids, slots)
        out, cache, state = step(oracle.params(), cache, state, batch)
        logits.append(np.asarray(out))
    return logits, cache, state, np.concatenate([[], *counted]).astype(int)


def assert_counts(state, counted):
    summary = oracle.summary(state)
    assert counted.size
    for row, layer in enumerate(summary.layers):
        assert summary.tokens[row] == counted.size
        for name in "kv":
            inv_scale = np.asarray(getattr(state, f"{name}_inv_scale"))[row]
            rows = oracle.rows_of(name, layer, counted)
            oracle.assert_reads(getattr(summary, name), row, rows, inv_scale)


@pytest.fixture(params=["at once", "by layer"])
def counting(request, monkeypatch):
    """Both ways of counting, whatever the batch."""
    monkeypatch.setattr(
        telemetry, "MAX_TOKENS_AT_ONCE", CHUNK - (request.param == "by layer")
    )
    oracle.jitted_step.cache_clear()
    yield
    oracle.jitted_step.cache_clear()


@pytest.mark.usefixtures("counting")
def test_a_step_counts_what_numpy_counts():
    config = oracle.cache_config(num_layers=3, high_precision_layers=(1,))
    *_, state, counted = run(random_batches(5), config=config, granularity="head")
    assert_counts(state, counted)
    assert oracle.summary(state).k.saturated_tokens.all()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.usefixtures("counting")
def test_a_step_on_a_gpu_counts_what_numpy_counts(implementation):
    config = oracle.cache_config(page_size=64, num_pages=1)
    *_, state, counted = run(
        random_batches(4), config=config, implementation=implementation
    )
    assert_counts(state, counted)


def test_rows_inside_the_window_do_not_count():
    cache, state = init()
    state = replace(state, window=jnp.int32(1000))
    for token_ids, slots in random_batches(2):
        batch = oracle.make_batch(token_ids, slots)
        _, cache, state = oracle.jitted_step()(oracle.params(), cache, state, batch)
    assert int(state.tokens_seen) > 0
    summary = oracle.summary(state)
    assert not summary.tokens.any()
    assert not summary.k.histogram.any()
    assert not summary.k.amax.any()


def test_static_layers_count_from_the_first_step_while_others_calibrate():
    scale = np.full((1, 1), 2.0, np.float32)
    scales = ScaleSet(
        granularity="tensor",
        layers=(1,),
        k_scale=scale,
        v_scale=scale,
        k_inv_scale=1 / scale,
        v_inv_scale=1 / scale,
        k_amax=scale,
        v_amax=scale,
    )
    config = oracle.cache_config()
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(window_tokens=1000),
        config,
        max_tokens_per_step=CHUNK,
        scales=scales,
        telemetry=True,
    )
    token_ids, slots = next(random_batches(1))
    batch = oracle.make_batch(token_ids, slots)
    cache = fp8kv.init_cache(config)
    _, _, state = oracle.jitted_step()(oracle.params(), cache, state, batch)
    counted = real(token_ids, slots)
    assert oracle.summary(state).tokens.tolist() == [0, counted.size]
    rows = oracle.rows_of("v", 1, counted)
    oracle.assert_reads(oracle.summary(state).v, 1, rows, [0.5])


def test_telemetry_changes_neither_logits_nor_pools_nor_scales():
    results = [run(random_batches(4), on=on)[:3] for on in (True, False)]
    (logits, cache, state), (plain_logits, plain_cache, plain_state) = results
    same = np.testing.assert_array_equal
    jax.tree.map(same, logits, plain_logits)
    jax.tree.map(same, cache, plain_cache)
    same(state.k_scale, plain_state.k_scale)
    jax.tree.map(same, state.v_tally, plain_state.v_tally)


def test_one_trace_and_no_host_with_donated_telemetry():
    chex.clear_trace_counter()
    step = fp8kv.make_steps(oracle.forward).score_step
    step = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=(1, 2))
    cache, state = init()
    treedef = jax.tree.structure(state)
    for token_ids, slots in random_batches(4):
        before = state.telemetry.histogram
        batch = oracle.make_batch(token_ids, slots)
        params = oracle.params()
        with jax.transfer_guard("disallow"):
            _, cache, state = step(params, cache, state, batch)
        assert before.is_deleted()
    assert jax.tree.structure(state) == treedef
    assert oracle.summary(state).tokens.any()


def test_a_reset_starts_telemetry_anew():
    _, cache, state, _ = run(random_batches(3))
    assert oracle.summary(state).tokens.all()
    _, state = fp8kv.reset(cache, state)
    assert not oracle.summary(state).tokens.any()
    assert not oracle.summary(state).k.amax.any()


def make_generator(**options):
    return Generator(
        oracle.forward,
        oracle.params(),
        oracle.cache_config(),
        fp8kv.CalibrationConfig(window_tokens=1),
        num_seqs=1,
        max_seq_len=32,
        prefill_chunks=(4,),
        **options,
    )


def test_a_generator_counts_its_prompt_and_its_tokens():
    generator = make_generator(telemetry=True)
    config = GenerationConfig(max_new_tokens=5)
    # The first chunk of 4 freezes the scales; the other 4 count, and 4 of the 5 new
    # tokens, since the last is never written.
    events = list(generator.generate([[7] * 8], config))
    summary = telemetry.summarize(generator.telemetry)
    assert summary.tokens.tolist() == [8, 8]
    tokens = [e.token_id for e in events if hasattr(e, "token_id")]
    rows = oracle.rows_of("k", 0, [7] * 4 + tokens[:-1])
    inv_scale = np.asarray(generator.calibration.k_inv_scale)[0]
    oracle.assert_reads(summary.k, 0, rows, inv_scale)


def test_a_generator_has_no_telemetry_unless_asked_for():
    assert make_generator().telemetry is None
