"""Counts and errors from histograms equal those of the values themselves."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8kv_jax.drift.sweep_statistics import (
    NUMBER_FORMATS,
    Histogram,
    histogram,
    magnitudes,
    value_of,
)
from pallas_kernels.fp8 import dequantize_rows, quantize_rows, row_statistics

SCALES = np.array([0.01, 0.7, 3.0, 2.0**-20], np.float32)


@pytest.fixture(scope="module")
def rows():
    """K and V [2, layers, tokens, heads, dim] with every kind of value in them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 2, 50, 2, 16)) * np.exp(rng.normal(0, 4, (2, 2, 50, 2, 16)))
    x = x.astype(np.float32)
    # Just at and beyond 464 * scale, zero, subnormal, and no numbers.
    x[:, :, 0, :, :8] = 4.625, 4.65625, 325, 326, 1392, 1400, 0, 1e-40
    x[:, :, 1, :, :3] = np.nan, np.inf, -np.inf
    return x.astype(jnp.bfloat16)


def of(rows):
    patterns = np.stack([histogram(magnitudes(x)) for x in rows])
    return Histogram.of_patterns(patterns)


@pytest.mark.parametrize("scale", SCALES)
def test_counts_equal_those_of_the_one_quantizer(rows, scale):
    tally = of(rows).tally(np.full((2, 2, 1), scale), NUMBER_FORMATS["fp8_e4m3"])
    inv_scale = np.full(2, np.float32(1) / scale)
    for index in np.ndindex(2, 2):
        real = np.ones(50, bool)
        wanted = row_statistics(jnp.asarray(rows[index]), jnp.asarray(inv_scale), real)
        assert np.array_equal(tally.saturated[index], wanted.num_saturated)
        assert np.array_equal(tally.underflowed[index], wanted.num_underflowed)
        assert np.array_equal(of(rows).nonfinite[index], wanted.num_nonfinite)


def test_the_error_is_that_of_writing_and_reading_back(rows):
    scales = SCALES[:2]
    finite = np.where(np.isfinite(rows.astype(np.float32)), rows, 0).astype(rows.dtype)
    scale = np.broadcast_to(scales, (2, 2, 2))
    tally = of(finite).tally(scale, NUMBER_FORMATS["fp8_e4m3"])
    for index in np.ndindex(2, 2):
        x = jnp.asarray(finite[index])
        codes = quantize_rows(x, jnp.asarray(np.float32(1) / scales))
        read = np.asarray(dequantize_rows(codes, jnp.asarray(scales)), np.float64)
        x = np.asarray(x, np.float64)
        error = ((read - x) ** 2).sum(axis=(0, 2))
        assert np.allclose(tally.squared_error[index], error, rtol=1e-6)
        assert np.allclose(tally.energy[index], (x**2).sum(axis=(0, 2)), rtol=1e-12)
    assert tally.relative_error().max() > 0.01


def test_histograms_add_up(rows):
    whole, parts = of(rows), of(rows[:, :, :20]) + of(rows[:, :, 20:])
    assert np.array_equal(whole.values, parts.values)
    assert np.array_equal(whole.counts, parts.counts)
    assert np.array_equal(whole.nonfinite, parts.nonfinite)


def test_patterns_are_the_order_of_the_values():
    patterns = np.arange(0x0080, 0x7F80, dtype=np.uint16)
    values = value_of(patterns)
    assert (np.diff(values) > 0).all()
    assert np.array_equal(magnitudes(-values.astype(ml_dtypes.bfloat16)), patterns)


@pytest.mark.parametrize("name", sorted(NUMBER_FORMATS))
def test_limits_are_where_rounding_leaves_the_format(name):
    number_format = NUMBER_FORMATS[name]
    largest, beyond = number_format.largest, number_format.saturated_above
    step = 2 * (beyond - largest)  # beyond is half a step above the largest
    below = np.float32([largest - step, largest, beyond, 10 * largest])
    assert number_format.round(below).tolist() == [largest - step, *[largest] * 3]
    edge = np.float32(number_format.underflowed_at)
    just_above = np.nextafter(edge, np.float32(1))
    assert number_format.round(np.array([edge, just_above])).tolist() == [0, 2 * edge]
