"""Counters are exact past 2^32 and do not wrap."""

import jax.numpy as jnp
import numpy as np

from fp8kv_jax import counters


def test_a_counter_carries_past_32_bits():
    counter = counters.zeros(2)
    amount = 2**31 - 1
    for _ in range(5):
        counter = counters.add(counter, jnp.array([amount, 1], jnp.int32))
    np.testing.assert_array_equal(counters.total(counter), [5 * amount, 5])


def test_a_fresh_counter_is_zero():
    assert counters.total(counters.zeros()) == 0
