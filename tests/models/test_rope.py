"""Rotary embedding against complex numbers, and the frequency scalings by hand."""

import cmath
import math

import jax.numpy as jnp
import numpy as np

from models.rope import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    inverse_frequencies,
    rotate,
    rotation,
    rotations,
)


def test_each_pair_turns_as_a_complex_number():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 2, 8)).astype(np.float32)
    positions = np.asarray([[0, 1, 2], [5, 100, 7000]], np.int32)
    frequencies = inverse_frequencies(Rope(base=100.0), 8)
    cos, sin = rotation(jnp.asarray(positions), frequencies)
    turned = np.asarray(rotate(jnp.asarray(x), cos, sin))
    for seq in range(2):
        for query in range(3):
            for head in range(2):
                for pair in range(4):
                    angle = positions[seq, query] * 100.0 ** (-2 * pair / 8)
                    row = x[seq, query, head]
                    z = complex(row[pair], row[pair + 4]) * cmath.exp(1j * angle)
                    got = turned[seq, query, head, [pair, pair + 4]]
                    # A float32 angle of up to 7000 is off by 7000 * 2^-24 ~ 4e-4,
                    # twice (frequency and product), times values of up to 4.
                    np.testing.assert_allclose(got, [z.real, z.imag], atol=4e-3)


def test_plain_frequencies_fall_from_one_by_powers_of_the_base():
    np.testing.assert_allclose(
        inverse_frequencies(Rope(base=16.0), 8), [1.0, 0.5, 0.25, 0.125], rtol=1e-7
    )


def test_linear_scaling_divides_all_frequencies():
    rope = Rope(base=16.0, scaling=LinearScaling(factor=8.0))
    np.testing.assert_allclose(
        inverse_frequencies(rope, 4), [1 / 8, 0.25 / 8], rtol=1e-7
    )


def test_divisors_divide_one_by_one():
    rope = Rope(base=16.0, scaling=FrequencyDivisors(divisors=(1.0, 5.0)))
    np.testing.assert_allclose(inverse_frequencies(rope, 4), [1.0, 0.05], rtol=1e-7)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones():
    # Frequencies 1, 1/4, 1/16, 1/64 turn 16, 4, 1 and 1/4 times in 32 pi tokens.
    context = 32 * math.pi
    rope = Rope(
        base=256.0,
        scaling=Llama3Scaling(
            factor=10.0,
            low_freq_factor=1.0,
            high_freq_factor=7.0,
            original_max_context=context,
        ),
    )
    # 4 turns lie halfway between 1 and 7: the mean of 1/4 and 1/40.
    wanted = [1.0, (0.25 + 0.025) / 2, 1 / 160, 1 / 640]
    np.testing.assert_allclose(inverse_frequencies(rope, 8), wanted, rtol=1e-6)


def test_equal_ropes_share_one_rotation():
    slow, fast = Rope(base=1e6), Rope(base=1e4)
    positions = jnp.zeros((1, 1), jnp.int32)
    assert len(rotations((fast, slow, fast, Rope(base=1e6)), 8, positions)) == 2
