"""What telemetry counts, merges and reads back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import telemetry_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8kv_jax import counters
from fp8kv_jax.drift.telemetry import (
    NUM_BINS,
    Telemetry,
    bin_edges,
    count_rows,
    init_telemetry,
    merge,
    summarize,
)

SCALES = (2.0**-100, 2.0**-60, 0.03, 1.0, 3.0, 2.0**100)


@st.composite
def bfloat16_rows(draw):
    """Rows [2, 4, 2, 8] of any bits: NaN, Inf, subnormals and all magnitudes."""
    bits = draw(st.binary(min_size=256, max_size=256))
    rows = np.frombuffer(bits, np.uint16).reshape(2, 4, 2, 8)
    inv_scale = draw(st.lists(st.sampled_from(SCALES), min_size=4, max_size=4))
    real = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    return rows, np.array(inv_scale, np.float32).reshape(2, 2), np.array(real)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@settings(max_examples=60, deadline=None)
@given(case=bfloat16_rows())
def test_counts_equal_a_plain_numpy_count(device, case):
    bits, inv_scale, real = case
    rows = bits.view(jnp.bfloat16)
    put = lambda x: jax.device_put(x, jax.devices(device)[0])  # noqa: E731
    counts = count_rows(put(rows), put(inv_scale), put(real))
    with np.errstate(invalid="ignore"):
        wide = rows.astype(np.float32)
    for layer in range(2):
        for head in range(2):
            expected = oracle.count_rows(
                wide[layer, real, head], inv_scale[layer, head]
            )
            for name in ("saturated_tokens", "histogram"):
                actual = getattr(counts, name)[layer, head]
                np.testing.assert_array_equal(actual, expected[name])


def bin_of(value, inv_scale=1.0):
    rows = jnp.full((1, 1, 1, 1), value, jnp.float32)
    counts = count_rows(rows, jnp.full((1, 1), inv_scale), jnp.ones(1, bool))
    return int(jnp.argmax(counts.histogram[0, 0]))


def test_a_bin_ends_at_its_edge_and_the_next_float_lies_above():
    for index, edge in enumerate(bin_edges()[:-1] * 448):
        edge = np.float32(edge)
        assert bin_of(edge) == index
        assert bin_of(np.nextafter(edge, np.float32(np.inf))) == index + 1


def test_the_first_bin_holds_what_is_stored_as_zero_and_the_last_has_no_end():
    assert bin_of(0.0) == bin_of(1e-40) == bin_of(-(2.0**-10)) == 0
    # A finite value whose product with inv_scale is infinite counts as past the end.
    assert bin_of(1e38, 1e10) == bin_of(448 * 8.1) == NUM_BINS - 1


def test_a_token_is_saturated_from_above_464():
    rows = jnp.array([464, 465, -466, jnp.inf, 0], jnp.float32).reshape(1, 5, 1, 1)
    counts = count_rows(rows, jnp.ones((1, 1)), jnp.ones(5, bool))
    assert counts.saturated_tokens.tolist() == [[2]]


def random_telemetry(rng):
    shape = 2, 2, 3

    def count(*shape):
        return jnp.asarray(rng.integers(0, 2**32, (*shape, 2), np.uint32))

    return Telemetry(
        amax=jnp.asarray(rng.random(shape, np.float32)),
        saturated=count(*shape),
        saturated_tokens=count(*shape),
        underflowed=count(*shape),
        nonfinite=count(*shape),
        histogram=count(*shape, NUM_BINS),
        tokens=count(2),
        fp8_layers=(0, 2),
        head_dim=4,
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_merge_is_associative_and_commutative():
    rng = np.random.default_rng(0)
    a, b, c = (random_telemetry(rng) for _ in range(3))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


def test_merging_with_nothing_changes_nothing():
    a = random_telemetry(np.random.default_rng(1))
    empty = jax.tree.map(jnp.zeros_like, a)
    assert_same(merge(a, empty), a)


def test_merged_counters_carry_past_32_bits():
    a = jnp.array([[1, 2**32 - 1], [0, 5]], jnp.uint32)
    b = jnp.array([[2, 3], [0, 6]], jnp.uint32)
    total = counters.total(counters.merge(a, b))
    np.testing.assert_array_equal(total, [(3 << 32) + 2**32 - 1 + 3, 11])


def test_merging_other_layers_is_an_error():
    a = init_telemetry(oracle.cache_config())
    b = init_telemetry(oracle.cache_config(high_precision_layers=(1,)))
    with pytest.raises(ValueError, match=r"same FP8 layers.*got \(\(0, 1\)"):
        merge(a, b)


def test_fresh_telemetry_sums_up_to_nothing():
    summary = summarize(init_telemetry(oracle.cache_config()))
    assert summary.layers == (0, 1)
    assert not summary.values.any()
    for readings in (summary.k, summary.v):
        assert not readings.amax.any()
        for name in oracle.COUNTS:
            assert not getattr(readings, name).any()
            assert getattr(readings, name).dtype == np.int64
