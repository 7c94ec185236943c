"""What one row asks for changes nothing for the others."""

import numpy as np
import pytest

from fp8kv_jax.serving.choosing import Choice, Rows, choose

NUM_ROWS, VOCAB = 6, 40
LOGITS = np.random.default_rng(0).normal(0, 2, (NUM_ROWS, VOCAB)).astype(np.float32)
ROWS = Rows(
    seeds=np.arange(NUM_ROWS, dtype=np.uint32),
    indices=np.zeros(NUM_ROWS, np.int32),
    positions=np.full(NUM_ROWS, 9, np.int32),
    temperatures=np.array([0, 1, 0, 1, 2, 1], np.float32),
    top_ps=np.ones(NUM_ROWS, np.float32),
)
GREEDY = ROWS.temperatures == 0


def ids(choice, rows=ROWS):
    return np.asarray(choose(LOGITS, rows, choice=choice).token_ids)


def test_rows_at_temperature_0_are_greedy_among_draws():
    drawn = ids(Choice(draws=True))
    np.testing.assert_array_equal(drawn[GREEDY], LOGITS.argmax(axis=1)[GREEDY])
    assert (drawn != LOGITS.argmax(axis=1)).any()


@pytest.mark.parametrize("logprobs", [False, True])
def test_rows_that_keep_every_token_draw_the_same_beside_a_nucleus(logprobs):
    top_ps = ROWS.top_ps.copy()
    top_ps[1] = 0.1
    narrow = ids(
        Choice(draws=True, nucleus=True, logprobs=logprobs),
        ROWS._replace(top_ps=top_ps),
    )
    np.testing.assert_array_equal(narrow[2:], ids(Choice(draws=True))[2:])
    assert narrow[1] == LOGITS[1].argmax()


@pytest.mark.parametrize("changed", ["seeds", "indices", "positions"])
def test_a_draw_depends_on_seed_index_and_position(changed):
    hot = ROWS._replace(temperatures=np.full(NUM_ROWS, 50, np.float32))
    other = hot._replace(**{changed: getattr(hot, changed) + 1})
    choice = Choice(draws=True)
    assert (ids(choice, hot) != ids(choice, other)).any()
