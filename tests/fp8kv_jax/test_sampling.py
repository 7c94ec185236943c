"""Sampling: what is kept, what is drawn, and what a draw depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8kv_jax.sampling import greedy, sample

PROBABILITIES = np.array([0.05, 0.5, 0.15, 0.3], np.float32)


def draw(logits, *, seed=0, temperature=1.0, top_p=1.0, sequences=None, position=7):
    rows = logits.shape[0]
    sequences = np.arange(rows, dtype=np.int32) if sequences is None else sequences
    ids = sample(
        logits,
        jnp.asarray(sequences, jnp.int32),
        jnp.full(rows, position, jnp.int32),
        key=jax.random.key(seed),
        temperature=jnp.float32(temperature),
        top_p=jnp.float32(top_p),
    )
    return np.asarray(ids)


def many(rows=4000):
    return jnp.tile(jnp.log(PROBABILITIES)[None, :], (rows, 1))


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = jnp.array([[0.0, 3.0, 3.0], [5.0, -1.0, 5.0]])
    np.testing.assert_array_equal(greedy(logits), [1, 0])


def test_draws_follow_the_probabilities():
    counts = np.bincount(draw(many()), minlength=4)
    # Binomial: five standard deviations of 4000 draws.
    bound = 5 * np.sqrt(4000 * PROBABILITIES * (1 - PROBABILITIES))
    assert (np.abs(counts - 4000 * PROBABILITIES) < bound).all()


def test_a_higher_temperature_flattens_the_draws():
    cold, warm = (draw(many(), temperature=t) for t in (0.5, 2.0))
    assert (cold == 1).mean() > 0.5 + 0.1 > 0.5 - 0.1 > (warm == 1).mean()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature):
    assert (draw(many(100), temperature=temperature) == 1).all()


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, {1}), (0.49, {1}), (0.7, {1, 3}), (0.9, {1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert set(draw(many(), top_p=top_p)) == kept


def test_a_draw_does_not_depend_on_the_other_rows():
    logits = jax.random.normal(jax.random.key(1), (5, 100))
    together = draw(logits)
    alone = [draw(logits[i : i + 1], sequences=[i])[0] for i in range(5)]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("change", [{"seed": 1}, {"position": 8}])
def test_a_draw_depends_on_seed_and_position(change):
    assert (draw(many(100)) != draw(many(100), **change)).any()


def test_a_draw_depends_on_the_sequence():
    assert len(set(draw(many(100)))) > 1
