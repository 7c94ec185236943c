"""The one quantizer: codes, rounding, saturation and counters against ml_dtypes."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import fp8

ALL_CODES = np.arange(256, dtype=np.uint8)
# 0x7F and 0xFF are the two NaN of the format.
FINITE_CODES = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]


def decoded(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def encoded(values) -> np.ndarray:
    """Codes of `saturating_cast`, compiled."""
    cast = jax.jit(fp8.saturating_cast)(jnp.asarray(values, jnp.float32))
    return np.asarray(cast).view(np.uint8)


def as_rows(values) -> jax.Array:
    """Values as rows of one head."""
    return jnp.asarray(values, jnp.float32).reshape(-1, 1, 1)


def quantized(values, inv_scale: float) -> list[float]:
    codes = fp8.quantize_rows(as_rows(values), jnp.full(1, inv_scale, jnp.float32))
    return codes.astype(jnp.float32).reshape(-1).tolist()


def counted(values, inv_scale: float = 1.0) -> list[float]:
    """Amax, saturated, underflowed and non-finite of one head."""
    x = as_rows(values)
    inv_scale = jnp.full(1, inv_scale, jnp.float32)
    real = jnp.ones(x.shape[0], bool)
    return [leaf.item() for leaf in fp8.row_statistics(x, inv_scale, real)]


def test_all_codes_decode_as_in_ml_dtypes():
    # docs/cases.md row 18: all 256 codes.
    codes = jnp.asarray(ALL_CODES.view(ml_dtypes.float8_e4m3fn)).reshape(256, 1, 1)
    rows = jax.jit(fp8.dequantize_rows)(codes, jnp.ones(1))
    np.testing.assert_array_equal(rows.reshape(-1), decoded(ALL_CODES))


def test_all_finite_codes_survive_decode_and_encode():
    assert FINITE_CODES.size == 254
    np.testing.assert_array_equal(encoded(decoded(FINITE_CODES)), FINITE_CODES)


def test_midpoints_round_to_even():
    # docs/cases.md row 18: all midpoints, ties to even.
    magnitudes = np.arange(0x7F, dtype=np.uint8)
    values = decoded(magnitudes)
    midpoints = (values[1:] + values[:-1]) / 2
    even = magnitudes[:-1] + (magnitudes[:-1] & 1)
    np.testing.assert_array_equal(encoded(midpoints), even)
    np.testing.assert_array_equal(encoded(-midpoints), even | 0x80)


@pytest.mark.parametrize("towards", [-np.inf, np.inf])
def test_next_to_a_midpoint_the_nearer_code_wins(towards):
    # A cast by way of float16 would round the midpoint's neighbours to it first.
    values = decoded(np.arange(0x7F, dtype=np.uint8))
    midpoints = (values[1:] + values[:-1]) / 2
    beside = np.nextafter(midpoints, np.float32(towards))
    want = beside.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(encoded(beside), want)
    assert (want == np.arange(0x7E) + (towards > 0)).all()


@given(hnp.arrays(np.float32, 64, elements=st.floats(-600, 600, width=32)))
@settings(max_examples=50, deadline=None)
def test_any_value_rounds_as_in_ml_dtypes(values):
    want = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    # XLA's CPU takes subnormals for zero; both round to zero, of either sign.
    np.testing.assert_array_equal(decoded(encoded(values)), want.astype(np.float32))


def test_overflow_saturates_and_never_turns_into_nan():
    # docs/cases.md row 16: K = 500 at scale 1; 464; 465; +-Inf.
    values = [500.0, 464.0, 465.0, np.inf, -np.inf, 1e38]
    assert quantized(values, 1.0) == [448, 448, 448, 448, -448, 448]


def test_saturated_counts_from_above_464():
    # docs/cases.md row 16: 464 and below not counted, 465 and above counted, Inf apart.
    assert counted([448.0, 464.0, -464.0]) == [464.0, 0, 0, 0]
    assert counted([465.0, -500.0]) == [500.0, 2, 0, 0]
    assert counted([np.nextafter(np.float32(464), np.inf)])[1] == 1
    assert counted([np.inf, -np.inf, 3.0]) == [3.0, 0, 0, 2]


def test_nan_stays_nan_and_is_counted_apart():
    # docs/cases.md row 17: NaN in K.
    np.testing.assert_array_equal(quantized([np.nan, 2.0], 1.0), [np.nan, 2.0])
    assert encoded([np.nan])[0] & 0x7F == 0x7F
    assert counted([np.nan, 2.0]) == [2.0, 0, 0, 1]


def test_scales_at_the_ends_of_their_range_give_no_inf():
    # docs/cases.md row 23: a scale near the largest float32, and the smallest.
    big, largest = 2.0**100, float(np.finfo(np.float32).max)
    # 2^127 * 2^-100 = 2^27 clips; 2^-20 * 2^100 = 2^80 clips; 2^127 * 2^100 overflows
    assert quantized([2.0**127, -(2.0**108)], 1 / big) == [448, -256]
    assert quantized([2.0**-20, largest], big) == [448, 448]
    assert counted([largest], big) == [largest, 1, 0, 0]
    codes = jnp.full((1, 1, 1), 448, fp8.FP8_DTYPE)
    assert fp8.dequantize_rows(codes, jnp.full(1, big)).item() == 448 * big


def test_underflowed_counts_nonzero_values_that_become_zero():
    half_step = 2.0**-10
    above = float(np.nextafter(np.float32(half_step), 1))
    assert quantized([half_step, above, -half_step], 1.0) == [0, 2.0**-9, 0]
    assert counted([half_step, above, -half_step, 0.0, -0.0])[2] == 2


def test_a_value_counts_as_underflowed_if_its_product_vanishes():
    assert counted([2.0**-100], 2.0**-100)[2] == 1


@given(
    hnp.arrays(np.float32, (5, 2, 3), elements=st.floats(width=32)),
    hnp.arrays(bool, 5),
    st.floats(-20, 20),
)
@settings(max_examples=100, deadline=None)
def test_statistics_equal_counts_by_numpy(x, real, exponent):
    inv_scale = np.exp2(np.array([exponent, -exponent], np.float32))
    # subnormals apart: XLA's CPU takes them for zero
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
    actual = fp8.row_statistics(
        jnp.asarray(x), jnp.asarray(inv_scale), jnp.asarray(real)
    )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = np.abs(x * inv_scale[None, :, None])
    finite = np.isfinite(x) & real[:, None, None]
    nonfinite = ~np.isfinite(x) & real[:, None, None]
    size = np.where(finite, np.abs(x), 0)
    want = [
        size.max(axis=(0, 2)),
        (finite & (y > 464)).sum(axis=(0, 2)),
        (finite & (x != 0) & (y <= 2.0**-10)).sum(axis=(0, 2)),
        nonfinite.sum(axis=(0, 2)),
    ]
    for got, expected in zip(actual, want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_product_is_rounded_once_and_in_float32():
    # 257/256 * 16.95 = 17.02 rounds to 18; by way of bfloat16, 1 * 16.95 gives 16.
    x = jnp.full((1, 1, 1), 257 / 256, jnp.float32)
    assert fp8.quantize_rows(x, jnp.full(1, 16.95, jnp.float32)).item() == 18
    assert fp8.quantize_rows(x.astype(jnp.bfloat16), jnp.full(1, 16.95)).item() == 16


def test_rows_of_any_rank_take_the_scale_of_their_head():
    x = jnp.ones((2, 3, 2, 4))
    codes = fp8.quantize_rows(x, jnp.array([2.0, 4.0]))
    assert codes[1, 2, :, 3].tolist() == [2, 4]
    assert fp8.dequantize_rows(codes, jnp.array([0.5, 0.25])).tolist() == x.tolist()


def test_the_round_trip_keeps_a_barrier_against_its_deletion():
    def round_trip(x):
        codes = fp8.quantize_rows(x, jnp.ones(1))
        return fp8.dequantize_rows(codes, jnp.ones(1))

    text = jax.jit(round_trip).lower(jnp.ones((1, 1, 8))).as_text()
    assert re.search(r"optimization_barrier .*f8E4M3FN", text)


@pytest.mark.gpu
def test_a_round_trip_inside_one_jit_still_rounds_on_the_gpu():
    @jax.jit
    def round_trip(x):
        return fp8.dequantize_rows(fp8.quantize_rows(x, jnp.ones(1)), jnp.ones(1))

    x = np.linspace(-500, 500, 4096, dtype=np.float32).reshape(-1, 1, 1)
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(round_trip(jnp.asarray(x)), want)


@pytest.mark.parametrize("scale", [0.5, jnp.float32(0.5), jnp.array([0.5])])
def test_one_scale_serves_all_heads(scale):
    assert fp8.per_head(scale, 3, name="k_scale").tolist() == [0.5] * 3


def test_a_scale_per_head_stays_as_it_is():
    scale = fp8.per_head(jnp.array([1.0, 2.0]), 2, name="k_scale")
    assert scale.tolist() == [1.0, 2.0]
    assert scale.dtype == jnp.float32


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 1), (0,)])
def test_a_scale_of_another_shape_is_an_error(shape):
    message = f"Expected k_scale to be one value .* got shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        fp8.per_head(jnp.ones(shape), 2, name="k_scale")


def test_only_e4m3_counts_as_fp8():
    assert fp8.is_fp8(jnp.zeros(1, jnp.float8_e4m3fn))
    assert not fp8.is_fp8(jnp.zeros(1, jnp.float8_e5m2))
