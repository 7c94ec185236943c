"""The scales of a running loop as an artifact: all of them, as they are, or refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from artifact_examples import (
    NUM_KV_HEADS,
    NUM_LAYERS,
    SCALE_PER_AMAX,
    assert_same_scales,
    identity,
    scale_set,
)

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import (
    CalibrationConfig,
    freeze,
    init_calibration,
    observe,
)
from fp8kv_jax.recalibration import moving_scales
from fp8kv_jax.scales.artifact import from_state, read_artifact, write_artifact
from fp8kv_jax.scales.scale_set import ScaleError
from pallas_kernels.fp8 import RowStatistics


def frozen_state(*, freezes=True, granularity="head", headroom=2.0):
    """Layer 1 keeps BF16; V of layer 2 (row 1) saw nothing in head 2."""
    config = CalibrationConfig(
        window_tokens=5, granularity=granularity, headroom=headroom
    )
    cache = CacheConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=8,
        num_pages=1,
        page_size=8,
        high_precision_layers=(1,),
    )
    state = init_calibration(config, cache, max_tokens_per_step=8)
    amax = np.random.default_rng(0).lognormal(size=(2, 3, 3)).astype(np.float32)
    amax[1, 1, 2] = 0
    state = observe_more(state, amax)
    return (freeze(state) if freezes else state), config, amax


def observe_more(state, amax):
    """Seven tokens of a given amax, [K and V, layers, heads]."""
    none = jnp.zeros((3, 3), jnp.int32)
    k, v = (RowStatistics(jnp.asarray(x), none, none, none) for x in amax)
    return observe(state, k, v, num_tokens=jnp.int32(7))


def test_a_running_loops_scales_become_an_artifact(tmp_path):
    state, config, amax = frozen_state()
    scales, manifest = from_state(state, config, identity())
    write_artifact(tmp_path / "a", scales, manifest)
    read, manifest = read_artifact(tmp_path / "a")
    assert_same_scales(read, scales)
    assert (read.layers, read.granularity) == ((0, 2, 3), "head")
    np.testing.assert_array_equal(read.k_scale, amax[0] * SCALE_PER_AMAX)
    np.testing.assert_array_equal(read.v_inv_scale, np.asarray(state.v_inv_scale))
    np.testing.assert_array_equal(read.v_amax, amax[1])
    assert manifest.skipped_layers == (1,)
    assert (manifest.data.source, manifest.data.tokens_seen) == ("online", 7)
    assert manifest.data.classes is None
    assert (manifest.recipe.rule, manifest.recipe.headroom) == ("amax", 2.0)


def test_groups_without_signal_carry_the_provisional_scale_and_are_listed():
    state, config, _ = frozen_state()
    scales, manifest = from_state(state, config, identity())
    [silent] = manifest.no_signal
    assert (silent.layer, silent.tensor, silent.group) == (2, "v", 2)
    assert scales.v_scale[1, 2] == config.provisional_scale


def test_a_state_that_is_not_frozen_is_refused():
    state, config, _ = frozen_state(freezes=False)
    with pytest.raises(
        ScaleError, match=r"got 7 of 5 tokens .* layers 0, 2, 3 are prov"
    ):
        from_state(state, config, identity())


def test_a_state_of_another_config_is_refused():
    state, config, _ = frozen_state()
    config = dataclasses.replace(config, headroom=3.0)
    with pytest.raises(ValueError, match=r"made with headroom 3.0.*got one .* 2"):
        from_state(state, config, identity())


def static_state(scales):
    """A loop whose config says per tensor; the given scales say otherwise."""
    config = CalibrationConfig(window_tokens=0, granularity="tensor")
    cache = CacheConfig(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=8,
        num_pages=1,
        page_size=8,
    )
    return init_calibration(config, cache, max_tokens_per_step=8, scales=scales), config


def test_given_scales_come_out_as_they_went_in():
    given = scale_set()
    scales, manifest = from_state(*static_state(given), identity(), parent="0" * 16)
    assert_same_scales(scales, given)
    assert (manifest.recipe.rule, manifest.recipe.headroom) == ("amax", 2.0)
    assert manifest.parent == "0" * 16


def test_an_amax_that_nobody_said_stays_unknown():
    unknown = np.full((NUM_LAYERS, NUM_KV_HEADS), np.nan, np.float32)
    given = dataclasses.replace(scale_set(), k_amax=unknown)
    scales, manifest = from_state(*static_state(given), identity())
    assert_same_scales(scales, given)
    assert manifest.no_signal == ()


def test_scales_that_left_their_amax_follow_no_rule():
    state, config, _ = frozen_state()
    moved = dataclasses.replace(
        state, k_scale=state.k_scale * 2, k_inv_scale=state.k_inv_scale / 2
    )
    recipe = from_state(moved, config, identity())[1].recipe
    assert (recipe.rule, recipe.headroom) == ("given", None)


def test_recalibrated_scales_follow_the_rule_by_the_amax_they_moved_to():
    state, config, amax = frozen_state()
    new = moving_scales(observe_more(state, 8 * amax))
    moved = dataclasses.replace(
        state,
        k_scale=new.k_scale,
        v_scale=new.v_scale,
        k_inv_scale=1 / new.k_scale,
        v_inv_scale=1 / new.v_scale,
        k_amax=new.k_amax,
        v_amax=new.v_amax,
    )
    scales, manifest = from_state(moved, config, identity())
    assert manifest.recipe.rule == "amax"
    np.testing.assert_array_equal(scales.k_scale, new.k_scale)
    assert (scales.k_amax > amax[0]).all()


def test_a_loop_without_fp8_layers_has_no_scales():
    config = CalibrationConfig()
    cache = CacheConfig(
        num_layers=2, num_kv_heads=3, head_dim=8, num_pages=1, page_size=8, dtype="bf16"
    )
    state = init_calibration(config, cache, max_tokens_per_step=8)
    with pytest.raises(ScaleError, match="at least one layer, got none"):
        from_state(state, config, identity())
