"""A sweep's scales and counts are those of the real calibration, bit for bit."""

import os

import numpy as np
import pytest
from sweep_examples import (
    SHAPE,
    SLICE,
    run_real_steps,
    saturated_after_freeze,
    write_random,
)

from fp8kv_jax.drift import sweep_statistics
from fp8kv_jax.drift.sweep import run_sweep
from fp8kv_jax.drift.sweep_evidence import arrange, freeze_points
from fp8kv_jax.drift.sweep_grid import Grid, resolve_orders
from fp8kv_jax.drift.trace import Trace, TraceText, open_trace, write_trace


def assert_agrees(outcome, state):
    """Compares an outcome with the state that the real steps came to."""
    scales = np.stack([state.k_scale, state.v_scale])
    assert outcome.scales.dtype == np.float32
    assert outcome.scales.tobytes() == scales.tobytes()
    assert outcome.frozen_at == (int(state.tokens_seen) if state.frozen else None)
    assert np.array_equal(outcome.no_signal, np.stack(state.no_signal))
    if state.frozen:
        saturated = saturated_after_freeze(state)
        assert np.array_equal(outcome.written.saturated, saturated)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_scales_and_counts_equal_those_of_real_steps(tmp_path, granularity):
    path = tmp_path / "t"
    lengths = {"probe": 5, "chat/0": 17, "chat/1": 3, "code": 40}
    rows = write_random(path, lengths)
    grid = Grid(
        orders=(("probe", "chat", "code"), ("code", "probe", "chat")),
        windows=(1, 6, 25, 66),
        chunks=(8,),
        headrooms=(1.0, 1.7),
        granularities=(granularity,),
    )
    counts = set()
    for outcome in run_sweep(open_trace(path), grid):
        setting = outcome.setting
        names = sorted(lengths, key=lambda n: setting.order.index(n.split("/")[0]))
        state = run_real_steps(
            [rows[name] for name in names],
            chunk=8,
            window_tokens=setting.window,
            headroom=setting.headroom,
            granularity=granularity,
        )
        assert_agrees(outcome, state)
        counts.add(int(outcome.written.saturated.sum()))
    assert len(counts) > 5  # so that equal counts mean something


def test_real_activations_give_the_scales_of_real_steps():
    trace = open_trace(SLICE)
    order = ("probe", "chat", "code", "more_code")
    sizes = {text.name: text.num_tokens for text in trace.texts}
    rows = [trace.rows(name, 0, sizes[name]) for name in order]
    grid = Grid(orders=(order,), windows=(30, 100))
    for outcome in run_sweep(trace, grid):
        window = outcome.setting.window
        assert_agrees(outcome, run_real_steps(rows, chunk=64, window_tokens=window))


def test_scales_of_a_probe_saturate_two_values_and_a_longer_window_none():
    order = ("probe", "chat", "code", "more_code")
    grid = Grid(orders=(order,), windows=(30, 100))
    probe, longer = run_sweep(open_trace(SLICE), grid)
    assert probe.frozen_at == 30
    assert probe.written.saturated.tolist() == [[0], [2]]
    assert longer.frozen_at == 30 + 44 + 32
    assert longer.written.saturated.tolist() == [[0], [0]]


def test_a_group_of_zeros_keeps_the_provisional_scale(tmp_path):
    path = tmp_path / "t"
    rows = write_random(path, {"a": 4})
    rows["a"][0][1, :, 0] = 0
    write_again(path, rows)
    grid = Grid(orders=(("a",),), windows=(4,), chunks=(8,), granularities=("head",))
    (outcome,) = run_sweep(open_trace(path), grid)
    assert np.argwhere(outcome.no_signal).tolist() == [[0, 1, 0]]
    assert outcome.scales[0, 1, 0] == 2.0
    state = run_real_steps([rows["a"]], chunk=8, window_tokens=4, granularity="head")
    assert_agrees(outcome, state)


def test_values_that_are_no_numbers_never_enter_a_scale(tmp_path):
    path = tmp_path / "t"
    rows = write_random(path, {"a": 6})
    rows["a"][0][0, 1, 0, :2] = np.nan, np.inf
    rows["a"][1][1, 2, 1, 0] = 1e-40  # counts as zero
    write_again(path, rows)
    grid = Grid(orders=(("a",),), windows=(3,), chunks=(8,))
    (outcome,) = run_sweep(open_trace(path), grid)
    assert_agrees(outcome, run_real_steps([rows["a"]], chunk=8, window_tokens=3))


def write_again(path, rows):
    ids = {name: np.zeros(k.shape[1], np.int32) for name, (k, _) in rows.items()}
    write_trace(path, ids, rows.values(), shape=SHAPE)


def test_a_window_that_is_never_full_keeps_the_provisional_scale(tmp_path):
    path = tmp_path / "t"
    rows = write_random(path, {"a": 5})
    grid = Grid(orders=(("a",),), windows=(6,), chunks=(8,))
    (outcome,) = run_sweep(open_trace(path), grid)
    assert outcome.frozen_at is None
    assert_agrees(outcome, run_real_steps([rows["a"]], chunk=8, window_tokens=6))


def test_the_batch_that_reaches_the_window_counts_whole():
    texts = [TraceText("probe", 30, True), TraceText("chat", 70, True)]
    points = freeze_points(texts, 64, (1, 30, 31, 94, 95, 100, 101))
    assert points == {1: 30, 30: 30, 31: 94, 94: 94, 95: 100, 100: 100, 101: None}


def test_text_that_no_order_names_is_held_out(tmp_path):
    path = tmp_path / "t"
    write_random(path, {"a": 20, "b": 20, "c": 20})
    trace = open_trace(path)
    grid = Grid(orders=(("a", "*"), ("a",)), windows=(1,), chunks=(1,), headrooms=(1,))
    mixed, alone = run_sweep(trace, grid, held_out=("c",))
    assert set(mixed.held_out) == {"c"}
    assert set(alone.held_out) == {"b", "c"}
    assert mixed.held_out["c"].num_tokens == 20
    # One scale set, so that the parts of one count are those of the other.
    total = alone.written.saturated + alone.held_out["b"].saturated
    assert np.array_equal(mixed.written.saturated, total)
    assert mixed.held_out["c"].saturated.sum() > 0


def test_orders_put_classes_one_after_another_and_seeds_shuffle_inside():
    names = ("b/0", "a/0", "c", "b/1", "a/1", "b/2")
    texts = [TraceText(name, 1, True) for name in names]

    def order(*items, seed=None, held_out=()):
        return [t.name for t in arrange(texts, items, held_out, seed)]

    assert order("c", "*") == ["c", "b/0", "a/0", "b/1", "a/1", "b/2"]
    assert order("a", "b") == ["a/0", "a/1", "b/0", "b/1", "b/2"]
    assert order("c", "*", held_out=("b",)) == ["c", "a/0", "a/1"]
    shuffled = {tuple(order("a", "*", seed=seed)) for seed in range(20)}
    assert len(shuffled) > 10
    assert all({x[0], x[1]} == {"a/0", "a/1"} for x in shuffled)
    assert order("*", seed=3) == order("*", seed=3)


def test_without_orders_each_class_goes_first_once():
    orders = resolve_orders((), ("probe", "chat", "zh"), ("zh",))
    assert orders == (("probe", "*"), ("chat", "*"))


@pytest.mark.parametrize(
    ("orders", "held_out", "message"),
    [
        ([("x",)], (), r"--order to name the classes of the trace \(a, b\), got 'x'"),
        ([], ("x",), r"--held-out among the classes of the trace \(a, b\), got 'x'"),
        ([("a",)], ("a",), "'a' in --order or in --held-out, got it in both"),
        ([("a", "a")], (), "each class once in --order, got a,a"),
        ([], ("a", "b"), "a class that --held-out does not name"),
    ],
)
def test_orders_that_the_trace_can_not_follow_are_refused(orders, held_out, message):
    with pytest.raises(ValueError, match=message):
        resolve_orders(orders, ("a", "b"), held_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": (0,)}, "windows of 1 to 4096 tokens, got 0"),
        ({"windows": (4097,)}, "windows of 1 to 4096 tokens, got 4097"),
        ({"windows": ()}, "at least one of windows"),
        ({"chunks": (0,)}, "chunks of at least 1 token, got 0"),
        ({"number_formats": ("fp4",)}, "formats among fp8_e4m3.*got 'fp4'"),
        ({"rules": ("p0",)}, "amax, or p and a percentage.*got 'p0'"),
        ({"rules": ("max",)}, "got 'max'"),
        ({"rules": ("pp",)}, "got 'pp'"),
        ({"granularities": ("row",)}, "'tensor' or 'head', got 'row'"),
        ({"headrooms": (-1.0,)}, "headroom to be a finite number"),
    ],
)
def test_a_grid_checks_itself(changes, message):
    with pytest.raises(ValueError, match=message):
        Grid(orders=(("a",),), **changes)


def test_headroom_below_one_is_raised_as_in_the_calibration():
    with pytest.warns(UserWarning, match="headroom 0.5 is set to 1"):
        grid = Grid(orders=(("a",),), headrooms=(0.5, 1.0))
    assert grid.headrooms == (1.0,)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_percentile_is_that_of_the_sorted_values_of_the_window(tmp_path, granularity):
    path = tmp_path / "t"
    rows = write_random(path, {"a": 40})
    rules = ("p50", "p99.5", "p100", "amax")
    grid = Grid(
        orders=(("a",),),
        windows=(10,),
        chunks=(7,),
        headrooms=(1,),
        rules=rules,
        granularities=(granularity,),
    )
    outcomes = dict(zip(rules, run_sweep(open_trace(path), grid), strict=True))
    for which, x in enumerate(rows["a"]):
        seen = np.abs(x[:, :14].astype(np.float32))
        by_head = seen.transpose(0, 2, 1, 3)
        groups = by_head if granularity == "head" else by_head[:, None]
        values = groups.reshape(*groups.shape[:2], -1)
        for rule, percentage in (("p50", 50), ("p99.5", 99.5), ("p100", 100)):
            wanted = np.percentile(values, percentage, axis=2, method="inverted_cdf")
            scales = wanted.astype(np.float32) * np.float32(1 / 448)
            assert np.array_equal(outcomes[rule].scales[which], scales)
    assert np.array_equal(outcomes["p100"].scales, outcomes["amax"].scales)


def test_a_trace_is_streamed_once_whatever_the_number_of_settings(
    tmp_path, monkeypatch
):
    path = tmp_path / "t"
    write_random(path, {"a": 100, "b": 50})
    monkeypatch.setattr(sweep_statistics, "BLOCK_TOKENS", 16)
    reads, rows = [], Trace.rows
    monkeypatch.setattr(
        Trace, "rows", lambda self, *part: reads.append(part) or rows(self, *part)
    )
    grid = Grid(
        orders=(("a", "b"), ("b", "a")),
        seeds=(None, 1, 2),
        chunks=(1, 8),
        windows=(1, 10, 120),
        granularities=("tensor", "head"),
    )
    told = []
    assert len(run_sweep(open_trace(path), grid, advance=told.append)) == 72
    assert all(stop - start <= 16 for _, start, stop in reads)
    assert sum(stop - start for _, start, stop in reads) == sum(told) == 150


@pytest.fixture(scope="module")
def whole_trace():
    path = os.environ.get("FP8KV_KV_TRACE")
    if not path:
        pytest.skip("needs the whole K/V trace, named by FP8KV_KV_TRACE")
    return open_trace(path)


def saturated_groups(outcome):
    """Layers with saturated values, as {"V26": 2}."""
    saturated = outcome.written.saturated
    return {f"{'KV'[i]}{j}": int(saturated[i, j]) for i, j in np.argwhere(saturated)}


@pytest.mark.model
@pytest.mark.parametrize("chunk", [64, 128])
def test_window_and_order_decide_what_the_whole_trace_saturates(whole_trace, chunk):
    orders = (("probe", "chat", "code"), ("probe", "chat", "zh", "code"))
    grid = Grid(orders=orders, windows=(30, 256), chunks=(chunk,))
    found = [saturated_groups(outcome) for outcome in run_sweep(whole_trace, grid)]
    assert found == [{"V26": 2}, {}, {"V26": 2}, {"V26": 2}]


@pytest.mark.model
def test_one_token_is_no_window(whole_trace):
    grid = Grid(orders=(("probe", "chat", "code"),), windows=(1,), chunks=(1,))
    (outcome,) = run_sweep(whole_trace, grid)
    assert outcome.frozen_at == 1
    assert len(saturated_groups(outcome)) == 38
    assert outcome.written.saturated.sum() > 1_000_000
