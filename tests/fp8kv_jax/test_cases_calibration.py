"""What goes wrong for people who calibrate online: one test for each public report.

Row numbers are those of the table in docs/cases.md.
"""

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_model
from rows_loop import RowsLoop, normal, write

import fp8kv_jax as fp8kv


def scale_for(amax, headroom=2.0):
    return np.float32(amax) * np.float32(headroom / 448)


def assert_same_bytes(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_row_1_a_probe_does_not_set_the_scales_of_later_traffic():
    loop = RowsLoop(cache={"num_pages": 40}, window_tokens=256)
    probe, traffic = normal(13, 0.1), normal(243, 5.0, seed=1)
    loop.write(probe)
    loop.write_all(traffic)
    assert int(loop.state.tokens_seen) == 256
    assert bool(loop.state.frozen)
    assert loop.state.k_scale[0, 0] == scale_for(np.abs(traffic).max())
    assert loop.differing_bytes == 0


def test_row_2_warm_up_junk_never_enters_amax_or_count():
    loop = RowsLoop(window_tokens=8)
    loop.write(normal(16, 1e4), slots=[-1] * 16)
    assert int(loop.state.tokens_seen) == int(loop.state.batches_seen) == 0
    assert not np.any(loop.state.k_amax)
    rows = normal(8)
    loop.write(rows)
    assert loop.state.k_scale[0, 0] == scale_for(np.abs(rows).max())
    assert loop.differing_bytes == 0


def test_row_3_the_switch_shows_on_the_next_call_of_one_compilation():
    loop = RowsLoop(window_tokens=20)
    before = write._cache_size()
    scales = []
    for i in range(4):
        loop.write(normal(8, seed=i))
        scales.append(float(loop.state.k_scale[0, 0]))
    assert scales[0] == scales[1] == 2.0
    assert scales[2] == scales[3] != 2.0
    assert write._cache_size() - before <= 1


def test_row_4_a_single_token_inside_a_longer_window_works():
    loop = RowsLoop(window_tokens=5)
    loop.write(normal(1))
    assert int(loop.state.tokens_seen) == 1
    assert not bool(loop.state.frozen)
    assert loop.differing_bytes == 0


def test_row_5_a_constant_warm_up_prompt_does_not_set_the_scale():
    loop = RowsLoop(window_tokens=24)
    loop.write(np.full((8, 2, 16), 0.01))
    data = normal(16, 3.0)
    loop.write(data)
    assert loop.state.v_scale[0, 0] == scale_for(np.abs(data).max())


def test_row_6_padding_with_garbage_changes_nothing():
    rows, garbage = normal(16), normal(16, 1e5, seed=2)
    padded, plain = RowsLoop(window_tokens=12), RowsLoop(window_tokens=12)
    mixed = np.where(np.arange(16)[:, None, None] % 2 == 0, rows, garbage)
    slots = np.where(np.arange(16) % 2 == 0, np.arange(16) // 2, -1)
    for start in (0, 8):
        padded.write(mixed, slots=np.where(slots < 0, -1, slots + start))
        plain.write(rows[::2], slots=np.arange(8) + start)
    assert_same_bytes((padded.cache, padded.state), (plain.cache, plain.state))


def test_row_7_the_straddling_batch_freezes_with_all_its_tokens():
    loop = RowsLoop(chunk=100, cache={"num_pages": 48}, window_tokens=256)
    first, second = normal(250), normal(100, 4.0, seed=1)
    loop.write_all(first[:100])
    loop.write_all(first[100:200])
    loop.write_all(first[200:])
    assert not bool(loop.state.frozen)
    loop.write(second)
    assert int(loop.state.tokens_seen) == int(loop.state.num_requantized) == 350
    assert int(loop.state.batches_seen) == 4
    amax = max(np.abs(first).max(), np.abs(second).max())
    assert loop.state.k_scale[0, 0] == scale_for(amax)
    assert loop.differing_bytes == 0


def test_row_8_the_last_token_wins_a_slot_in_a_batch_and_on_reuse():
    loop = RowsLoop(window_tokens=20)
    loop.write(normal(8, seed=1), slots=[3, 5, 3, 7, 5, 3, 9, 9])
    loop.write(normal(2, seed=2), slots=[7, 5])
    loop.write(normal(10, seed=3), slots=np.arange(20, 30))
    assert bool(loop.state.frozen)
    # Losers of a slot were written and observed all the same.
    assert int(loop.state.tokens_seen) == 20
    assert int(loop.state.num_requantized) == 4 + 10
    assert loop.differing_bytes == 0


def test_row_9_a_page_copied_inside_the_window_is_requantized_too():
    loop = RowsLoop(window_tokens=12)
    loop.write(normal(8))
    loop.write(normal(8, seed=1), slots=np.arange(16, 24), copies=[[0, 5], [-1, -1]])
    assert bool(loop.state.frozen)
    assert loop.oracle.written[40:48].all()
    assert loop.differing_bytes == 0


def test_row_10_requests_that_share_pages_across_the_freeze_read_right_values():
    loop = RowsLoop(window_tokens=12, headroom=1.0)
    k, v = normal(8, 3.0), normal(8, 2.0, seed=1)
    loop.write(k, v)
    # Two requests go on from the shared page, one before and one at the freeze.
    for seed, slot in ((2, 8), (3, 16)):
        loop.write(normal(2, seed=seed), slots=[slot, slot + 1], seq_len=10)
    assert bool(loop.state.frozen)
    q = normal(1, seed=4)
    out = loop.write(q * 0, q=q, slots=[-1], seq_len=8)[0]
    logits = np.einsum("qhd,thd->qht", q, k) / 4
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    want = np.einsum("qht,thd->qhd", weights / weights.sum(-1, keepdims=True), v)
    # Each stored value is off by at most 2^-4 of itself, logits by 2^-4 |q||k| / 4.
    assert np.abs(out - want).max() < 0.15 * np.abs(v).max()
    assert np.abs(2 * out - want).max() > 0.15 * np.abs(v).max()


@pytest.mark.parametrize("frozen_first", [False, True])
def test_row_11_inf_is_counted_and_stays_in_its_slot(frozen_first):
    loop = RowsLoop(window_tokens=12)
    rows = normal(12)
    with_inf = rows[:3].copy()
    with_inf[1, 0, 5] = np.inf
    if frozen_first:
        loop.write(rows)
        loop.write(with_inf)
    else:
        loop.write(with_inf)
        loop.write(rows)
    assert bool(loop.state.frozen)
    assert loop.state.k_scale[0, 0] == scale_for(np.abs(rows).max())
    phase = "frozen" if frozen_first else "provisional"
    assert loop.count("k", "nonfinite", phase) == 1
    assert loop.count("k", "saturated", phase) == 0
    codes = np.asarray(loop.cache.k_pages[0]).view(ml_dtypes.float8_e4m3fn)
    assert np.sum(np.abs(codes.astype(np.float32)) == 448) == 1
    assert loop.differing_bytes == 0


@pytest.mark.parametrize(
    ("states", "ready"),
    [([None, False, True], False), ([None, True], True), ([], True), ([None], True)],
)
def test_row_12_layers_that_never_calibrate_hold_nothing_up(states, ready):
    assert fp8kv.graphs_ready(states) is ready


def test_row_12_graphs_are_ready_once_a_state_is_frozen():
    loop = RowsLoop(window_tokens=4)
    assert not fp8kv.graphs_ready([None, loop.state])
    loop.write(normal(4))
    assert fp8kv.graphs_ready([None, loop.state])


def test_row_13_reset_re_arms_and_stale_pages_cannot_be_read():
    loop = RowsLoop(window_tokens=8)
    loop.write(normal(8))
    loop.state = fp8kv.release_window(loop.state)
    epoch = int(loop.state.epoch)
    cache, state = jax.jit(fp8kv.reset, donate_argnums=(0, 1))(loop.cache, loop.state)
    assert not any(np.asarray(x).view(np.uint8).any() for x in jax.tree.leaves(cache))
    assert int(state.epoch) == epoch + 1
    assert not bool(state.frozen)
    assert int(state.tokens_seen) == 0
    again = RowsLoop(window_tokens=8)
    again.cache, again.state = cache, state
    new = normal(8, 7.0, seed=3)
    again.write(new)
    assert bool(again.state.frozen)
    assert again.state.k_scale[0, 0] == scale_for(np.abs(new).max())
    assert again.differing_bytes == 0


def test_row_15_a_huge_query_does_not_touch_k_scale():
    plain, loop = RowsLoop(window_tokens=8), RowsLoop(window_tokens=8)
    rows = normal(8)
    plain.write(rows)
    loop.write(rows, q=normal(8, 1e6))
    np.testing.assert_array_equal(plain.state.k_scale, loop.state.k_scale)


def test_window_of_one_freezes_on_the_first_batch():
    loop = RowsLoop(window_tokens=1)
    loop.write(normal(16))
    assert bool(loop.state.frozen)
    assert int(loop.state.tokens_seen) == 16
    assert loop.differing_bytes == 0


def test_a_frozen_state_is_a_fixed_point_but_for_its_counters():
    loop = RowsLoop(window_tokens=8)
    loop.write(normal(8))
    before = jax.tree.map(np.asarray, loop.state)
    loop.write(normal(8, 1e3, seed=1))
    for name in ("k_amax", "v_amax", "k_scale", "v_inv_scale", "tokens_seen", "epoch"):
        np.testing.assert_array_equal(getattr(before, name), getattr(loop.state, name))
    assert loop.count("k").sum() > 0


def test_values_past_the_pool_are_dropped_counted_and_not_observed():
    loop = RowsLoop(window_tokens=8)
    loop.write(normal(3), slots=[0, 64, 1000])
    assert int(loop.state.tokens_seen) == 1
    assert fp8kv.counters.total(loop.state.num_dropped) == 2


def test_the_staging_free_step_is_bit_equal():
    steps = tiny_model.jitted_steps()
    config = tiny_model.cache_config()
    results = []
    for release in (False, True):
        cache = fp8kv.init_cache(config)
        state = fp8kv.init_calibration(
            fp8kv.CalibrationConfig(window_tokens=6), config, max_tokens_per_step=16
        )
        table = fp8kv.BlockTable(num_pages=16, page_size=8, num_seqs=1, max_seq_len=32)
        params = tiny_model.init_params()
        prompt = fp8kv.make_batch(table, {0: range(3, 12)}, {0: 0}, num_queries=16)
        (logits, _), cache, state = steps.prefill_step(params, cache, state, prompt)
        if release:
            state = fp8kv.release_window(state)
        for i in range(5):
            batch = fp8kv.make_batch(table, {0: [20 + i]}, {0: 9 + i}, num_queries=1)
            (logits, _), cache, state = steps.decode_step(params, cache, state, batch)
        results.append((logits, cache, state.k_scale, state.v_inv_scale))
    assert_same_bytes(*results)


def test_release_before_the_freeze_is_refused():
    loop = RowsLoop(window_tokens=8)
    with pytest.raises(ValueError, match=r"Expected frozen scales, got 0 of 8 tokens"):
        fp8kv.release_window(loop.state)


def test_a_step_too_large_for_the_window_is_refused_at_trace_time():
    loop = RowsLoop(window_tokens=8, chunk=4)
    loop.chunk = 16
    with pytest.raises(ValueError, match=r"at most 4 tokens in a step .* got 16"):
        loop.write(normal(16))
