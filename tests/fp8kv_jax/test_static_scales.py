"""Scales that are known before the first token: no window for the layers they cover."""

import numpy as np
import pytest
from oracle import quantize
from rows_loop import RowsLoop, normal

import fp8kv_jax as fp8kv
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet


def scale_set(layers, granularity="tensor", value=0.05):
    groups = 2 if granularity == "head" else 1
    rows = {i: (np.full(groups, value), np.full(groups, 2 * value)) for i in layers}
    return ScaleSet.from_scales(rows, granularity=granularity)


def init(scales, *, window=0, num_layers=2, **cache):
    config = fp8kv.CacheConfig(
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=16,
        num_pages=8,
        page_size=8,
        **cache,
    )
    calibration = fp8kv.CalibrationConfig(window_tokens=window)
    return config, fp8kv.init_calibration(
        calibration, config, max_tokens_per_step=16, scales=scales
    )


def loop_with(config, state):
    loop = RowsLoop(
        cache={
            "num_layers": config.num_layers,
            "high_precision_layers": config.high_precision_layers,
        }
    )
    loop.state = state
    return loop


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_covered_layers_start_frozen_without_a_window(granularity):
    config, state = init(scale_set([0, 1], granularity))
    assert bool(state.frozen)
    assert state.staged is None
    assert fp8kv.graphs_ready([state])
    loop = loop_with(config, state)
    rows = np.stack([normal(4), normal(4, seed=1)])
    loop.write(rows)
    assert int(loop.state.tokens_seen) == 0
    assert loop.differing_bytes == 0
    k = np.asarray(loop.cache.k_pages[1]).view(np.uint8).transpose(0, 2, 1, 3)
    inverse = np.full(2, np.float32(1) / np.float32(0.05))
    np.testing.assert_array_equal(k[0, :4], quantize(rows[1], inverse))


def test_a_layer_without_scales_and_without_a_window_is_refused():
    with pytest.raises(ValueError, match=r"no scales are given for layers \(1,\)"):
        init(scale_set([0]))


def test_skipped_layers_may_stay_in_bf16():
    _, state = init(scale_set([0]), high_precision_layers=(1,))
    assert state.fp8_layers == (0,)
    assert bool(state.frozen)


def test_skipped_layers_may_calibrate_online():
    config, state = init(scale_set([0]), window=8)
    assert state.calibrating_layers == (1,)
    loop = loop_with(config, state)
    rows = np.stack([normal(8, 9.0), normal(8, seed=1)])
    loop.write(rows[:, :4])
    assert not bool(loop.state.frozen)
    loop.write(rows[:, 4:])
    assert bool(loop.state.frozen)
    assert loop.state.k_scale[0, 0] == np.float32(0.05)
    want = np.abs(rows[1]).max() * np.float32(2 / 448)
    assert loop.state.k_scale[1, 0] == want
    assert loop.differing_bytes == 0


def test_a_static_layer_counts_as_frozen_while_others_calibrate():
    config, state = init(scale_set([0]), window=8)
    loop = loop_with(config, state)
    loop.write(np.full((2, 4, 2, 16), 1e3))
    assert not bool(loop.state.frozen)
    # 4 tokens of 2 heads of 16 values, at a scale that covers 448 * 0.05; the other
    # layer's provisional scale covers 896, and 1000 / 2 is past 464.
    assert loop.count("k", phase="frozen").tolist() == [[128], [0]]
    assert loop.count("k", phase="provisional").tolist() == [[0], [128]]


def test_scales_of_another_shape_are_refused():
    four_heads = ScaleSet.from_scales({0: (np.ones(4), np.ones(4))}, granularity="head")
    with pytest.raises(ScaleError, match=r"num_kv_heads=2"):
        init(four_heads, num_layers=1)


def test_scales_for_layers_the_model_lacks_are_refused():
    with pytest.raises(ScaleError, match="some for layers 5"):
        init(scale_set([0, 1, 5]))
