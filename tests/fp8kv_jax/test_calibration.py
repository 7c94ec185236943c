"""Configuration: what is refused, what is clamped, and what the state starts as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

import fp8kv_jax as fp8kv
from fp8kv_jax import calibration, staging
from pallas_kernels.fp8 import RowStatistics


def make_state(**changes):
    config = fp8kv.CalibrationConfig(**({"window_tokens": 4} | changes))
    cache = tiny_model.cache_config()
    return fp8kv.init_calibration(config, cache, max_tokens_per_step=8)


def statistics(amax, heads=2):
    shape = (tiny_model.NUM_LAYERS, heads)
    zeros = jnp.zeros(shape, jnp.int32)
    return RowStatistics(jnp.full(shape, amax, jnp.float32), zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": "channel"}, "'tensor' or 'head', got 'channel'"),
        ({"window_tokens": -1}, "window_tokens >= 0"),
        ({"headroom": 0.0}, "headroom to be a finite number"),
        ({"headroom": float("nan")}, "headroom to be a finite number"),
        ({"provisional_scale": 0.0}, "provisional_scale to be within"),
        ({"provisional_scale": 2.0**101}, "provisional_scale to be within"),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        fp8kv.CalibrationConfig(**changes)


def test_headroom_below_one_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match=r"headroom 0.5 is set to 1.0"):
        config = fp8kv.CalibrationConfig(headroom=0.5)
    assert config.headroom == 1.0


def test_a_huge_window_is_cut_with_a_warning():
    with pytest.warns(UserWarning, match="window_tokens 1000000 is set to 4096"):
        config = fp8kv.CalibrationConfig(window_tokens=10**6)
    assert config.window_tokens == 4096


def test_a_window_of_zero_without_scales_is_refused():
    with pytest.raises(ValueError, match="no scales are given"):
        make_state(window_tokens=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages to be at least 1, got 0"),
        ({"page_size": 24}, "page_size to be a power of two"),
        ({"dtype": "e5m2"}, "dtype to be one of"),
        ({"high_precision_dtype": "fp8"}, "wider than fp8"),
        ({"high_precision_layers": (0, 2)}, r"within 0\.\.1.*got \[2\]"),
    ],
)
def test_a_wrong_cache_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_model.cache_config(**changes)


def test_a_cache_without_fp8_layers_is_ready_from_the_start():
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(),
        tiny_model.cache_config(dtype="bf16"),
        max_tokens_per_step=8,
    )
    assert bool(state.frozen)
    assert state.staged is None
    assert fp8kv.graphs_ready([state])


def test_a_state_has_as_many_arrays_for_any_number_of_layers():
    # A call takes the host about 2 us for each array that it is given.
    config = fp8kv.CalibrationConfig(window_tokens=8)
    sizes = {
        len(
            jax.tree.leaves(
                fp8kv.init_calibration(config, cache, max_tokens_per_step=8)
            )
        )
        for cache in (tiny_model.cache_config(), tiny_model.cache_config(num_layers=5))
    }
    assert len(sizes) == 1


def test_rows_past_the_window_reach_no_other_layers_rows():
    cache = jax.eval_shape(lambda: fp8kv.init_cache(tiny_model.cache_config()))
    window = staging.init_window(cache, (0, 1), 3)
    rows = [jnp.full((2, *window.k.shape[2:]), layer, jnp.bfloat16) for layer in (1, 2)]
    slots = jnp.array([5, 6], jnp.int32)
    real = jnp.array([True, True])
    window = staging.stage(
        window, rows, rows, slots=slots, real=real, num_staged=jnp.int32(2)
    )
    np.testing.assert_array_equal(window.v[:, :, 0, 0], [[0, 0, 1], [0, 0, 2]])


def test_scale_is_amax_times_one_float32_constant():
    state = make_state(headroom=1.5, granularity="head")
    amax = 3.7
    state = calibration.observe(
        state, statistics(amax), statistics(2 * amax), num_tokens=jnp.int32(4)
    )
    state = jax.jit(calibration.freeze)(state)
    want = np.float32(amax) * np.float32(1.5 / 448)
    np.testing.assert_array_equal(state.k_scale, np.full((2, 2), want))
    np.testing.assert_allclose(state.k_inv_scale * state.k_scale, 1, rtol=2e-7)
    assert int(state.epoch) == 1


@pytest.mark.parametrize(("amax", "want"), [(1.2e-38, 2.0**-100), (3e38, 2.0**100)])
def test_row_23_scales_stay_within_their_limits(amax, want):
    state = calibration.observe(
        make_state(), statistics(amax), statistics(1.0), num_tokens=jnp.int32(4)
    )
    state = calibration.freeze(state)
    np.testing.assert_array_equal(state.k_scale, np.full((2, 1), want, np.float32))
    assert np.isfinite(state.k_inv_scale).all()


def test_the_amax_does_not_depend_on_the_order_of_batches():
    values = [3.0, 7.0, 0.5]
    results = []
    for order in (values, values[::-1]):
        state = make_state(window_tokens=100)
        for amax in order:
            state = calibration.observe(
                state, statistics(amax), statistics(amax), num_tokens=jnp.int32(2)
            )
        results.append(np.asarray(state.k_amax))
    np.testing.assert_array_equal(*results)
    assert results[0].max() == 7.0


def test_states_of_other_windows_and_headrooms_share_a_compilation():
    observe = jax.jit(lambda s: calibration.freeze(s))
    for window, headroom in ((4, 2.0), (9, 1.0)):
        config = fp8kv.CalibrationConfig(window_tokens=window, headroom=headroom)
        observe(
            fp8kv.init_calibration(
                config,
                tiny_model.cache_config(),
                max_tokens_per_step=8,
                num_window_rows=20,
            )
        )
    assert observe._cache_size() == 1
