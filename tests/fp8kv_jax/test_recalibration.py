"""Row 14: scales move only by a transaction that rewrites every page with them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle import canonical, pool_rows
from rows_loop import RowsLoop, normal

from fp8kv_jax.recalibration import NewScales, moving_scales, recalibrate

move = jax.jit(recalibrate, donate_argnums=(0, 1))


def frozen_loop(granularity="head"):
    loop = RowsLoop(window_tokens=8, headroom=1.0, granularity=granularity)
    loop.write(normal(8), normal(8, 3.0, seed=1))
    return loop


def values(loop):
    """Float32 codes of K and V by slot, [num_slots, heads, dim]."""
    pools = pool_rows(loop.cache.k_pages[0], loop.cache.v_pages[0])
    return [x.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for x in pools]


def test_row_14_values_that_double_move_no_scale_and_are_counted():
    loop = frozen_loop()
    before = np.asarray(loop.state.k_scale)
    loop.write(4 * normal(8))
    np.testing.assert_array_equal(loop.state.k_scale, before)
    assert loop.count("k").sum() > 0
    assert (loop.state.k_live_amax > loop.state.k_amax).all()


def test_row_14_recalibrate_rewrites_live_pages_at_the_new_scale():
    loop = frozen_loop()
    loop.write(4 * normal(8))
    old = [np.asarray(getattr(loop.state, f"{w}_scale"))[0] for w in "kv"]
    codes = values(loop)
    new = moving_scales(loop.state, decay=0.25)
    error, loop.cache, loop.state = move(loop.cache, loop.state, new)
    assert int(loop.state.epoch) == 2
    np.testing.assert_array_equal(loop.state.k_scale, new.k_scale)
    got = pool_rows(loop.cache.k_pages[0], loop.cache.v_pages[0])
    for i, which in enumerate("kv"):
        inverse = np.asarray(getattr(loop.state, f"{which}_inv_scale"))[0]
        x = codes[i] * old[i][:, None]
        y = np.clip(x * inverse[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(got[i], canonical(y.view(np.uint8)))
        change = y.astype(np.float32) / inverse[:, None] - x
        want = np.linalg.norm(change, axis=(0, 2)) / np.linalg.norm(x, axis=(0, 2))
        np.testing.assert_allclose(getattr(error, which)[0], want, rtol=1e-3)
        # One more rounding: at most half a step of 2^-3 for each value.
        assert (want <= 2**-4).all()
    # What is written from now on has the same basis.
    loop.write(4 * normal(8, seed=5))
    assert loop.count("k").sum() > 0


def test_a_larger_power_of_two_rounds_only_what_leaves_the_normal_range():
    loop = frozen_loop()
    state = loop.state
    codes = values(loop)
    new = NewScales(
        k_scale=2 * state.k_scale,
        v_scale=2 * state.v_scale,
        k_amax=2 * state.k_amax,
        v_amax=2 * state.v_amax,
    )
    error, loop.cache, loop.state = move(loop.cache, loop.state, new)
    for before, after in zip(codes, values(loop), strict=True):
        # The smallest normal code is 2^-6.
        normal_range = np.abs(before) >= 2**-5
        np.testing.assert_array_equal(2 * after[normal_range], before[normal_range])
    assert (np.stack([error.k, error.v]) < 1e-3).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_bad_scales_change_nothing(bad):
    loop = frozen_loop()
    before = values(loop)
    scale = jnp.array(loop.state.k_scale).at[0, 1].set(bad)
    new = replace(moving_scales(loop.state), k_scale=scale)
    _, loop.cache, loop.state = move(loop.cache, loop.state, new)
    assert int(loop.state.epoch) == 1
    np.testing.assert_array_equal(values(loop), before)


def test_nothing_moves_before_the_freeze():
    loop = RowsLoop(window_tokens=8)
    loop.write(normal(4))
    new = moving_scales(loop.state)
    _, loop.cache, loop.state = move(loop.cache, loop.state, new)
    assert int(loop.state.epoch) == 0
    loop.write(normal(4, seed=1))
    assert loop.differing_bytes == 0


def test_groups_that_saw_nothing_keep_their_scale():
    loop = frozen_loop()
    new = moving_scales(loop.state, decay=0.5)
    np.testing.assert_array_equal(new.k_scale, loop.state.k_scale)


def test_a_decay_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"decay to be within \[0, 1\], got 2"):
        moving_scales(frozen_loop().state, decay=2)
