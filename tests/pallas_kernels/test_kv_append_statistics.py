"""The statistics of the append kernels, in plain jnp: limits, and counting by bits."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.fp8 import SATURATED_ABOVE, UNDERFLOWED_AT, row_statistics
from pallas_kernels.kv_append import mosaic_gpu_statistics as stats

# All magnitudes that bfloat16 has, Inf left out.
MAGNITUDES = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)

inv_scales = st.floats(-100, 100).map(lambda e: np.float32(2.0) ** np.float32(e))


def largest_by_search(bound: float, inv_scale: np.float32):
    with np.errstate(over="ignore"):
        fits = MAGNITUDES.astype(np.float32) * inv_scale <= np.float32(bound)
    return MAGNITUDES[np.flatnonzero(fits)[-1]]


@given(inv_scales)
@settings(max_examples=30, deadline=None)
def test_limits_are_the_largest_magnitudes_within_the_bounds(inv_scale):
    limits = stats.find_limits(jnp.asarray(inv_scale))
    assert limits.small == largest_by_search(UNDERFLOWED_AT, inv_scale)
    assert limits.large == largest_by_search(SATURATED_ABOVE, inv_scale)


def found(x: np.ndarray, inv_scale: np.float32, *, real=None) -> list[float]:
    limits = stats.find_limits(jnp.asarray(inv_scale))
    counter = stats.Counter((4, 16), limits)
    tally = counter.count(counter.nothing, jnp.asarray(x), real)
    return [value.item() for value in tally.totals()]


def expected(x: np.ndarray, inv_scale: np.float32, *, real=None) -> list[float]:
    rows = jnp.asarray(x)[:, None, :]
    real = jnp.ones(x.shape[0], bool) if real is None else real
    statistics = row_statistics(rows, jnp.asarray(inv_scale).reshape(1), real)
    return [value.item() for value in statistics]


@given(inv_scales, st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_values_near_the_limits_count_as_in_the_reference(inv_scale, seed):
    rng = np.random.default_rng(seed)
    near = np.array([UNDERFLOWED_AT, SATURATED_ABOVE, 1.0]) / np.float64(inv_scale)
    x = rng.choice(near, (64, 64)) * rng.normal(1, 0.01, (64, 64))
    x = np.where(rng.random((64, 64)) < 0.5, -x, x).astype(ml_dtypes.bfloat16)
    assert found(x, inv_scale) == expected(x, inv_scale)


@pytest.mark.parametrize("exponent", [-120, -100, -1, 0, 90, 116, 117, 127])
def test_all_values_of_bfloat16_count_as_in_the_reference(exponent):
    inv_scale = np.float32(1.3) * np.float32(2.0**exponent)
    # Zeros, subnormals, Inf and NaN among them, and of each sign.
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 64)
    amax, *counts = found(x, inv_scale)
    assert [amax, *counts] == expected(x, inv_scale)
    assert counts[2] == 2 * 128


@pytest.mark.parametrize("amax", [0.0, 2.0**-130, 3.0])
def test_amax_is_that_of_the_finite_values(amax):
    x = np.full((4, 16), -amax, ml_dtypes.bfloat16)
    x[1, 2:5] = [np.nan, np.inf, -np.inf]
    assert found(x, np.float32(2)) == expected(x, np.float32(2))


def test_rows_that_are_not_real_count_nothing():
    x = np.linspace(-1000, 1000, 8 * 16).reshape(8, 16).astype(ml_dtypes.bfloat16)
    x[3] = np.nan
    real = jnp.arange(8) % 3 > 0
    assert found(x, np.float32(1), real=real) == expected(x, np.float32(1), real=real)
    assert found(x, np.float32(1)) != expected(x, np.float32(1), real=real)


def test_totals_join_like_the_sets_of_values():
    x = np.linspace(-1000, 1000, 128 * 64).reshape(128, 64).astype(ml_dtypes.bfloat16)
    halves = [stats.Totals(*found(half, np.float32(1))) for half in np.split(x, 2)]
    joined = stats.nothing().join(halves[0]).join(halves[1])
    assert [value.item() for value in joined] == expected(x, np.float32(1))
