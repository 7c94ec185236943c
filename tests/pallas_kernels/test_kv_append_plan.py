"""The plan of an append: who wins a slot, and which kernel writes whom."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_append import plan_append
from pallas_kernels.kv_append.config import MIN_RUN_TOKENS

PAGE_SIZE = 16
NUM_PAGES = 4
NUM_SLOTS = NUM_PAGES * PAGE_SIZE

tiny_plan = functools.partial(plan_append, num_pages=NUM_PAGES, page_size=PAGE_SIZE)


def last_token_of_each_slot(slots, num_slots: int) -> dict[int, int]:
    return {slot: t for t, slot in enumerate(slots) if 0 <= slot < num_slots}


slot_lists = st.lists(st.integers(-3, NUM_SLOTS + 5), min_size=48, max_size=48)


@st.composite
def run_lists(draw) -> list[int]:
    """48 slots in runs that start anywhere, so pages repeat and runs overlap."""
    slots: list[int] = []
    while len(slots) < 48:
        start = draw(st.integers(-4, NUM_SLOTS - 1))
        slots += range(start, start + draw(st.integers(1, 40)))
    return slots[:48]


@given(slot_lists)
@settings(max_examples=50, deadline=None)
def test_the_last_token_of_a_slot_wins(slots):
    plan = tiny_plan(jnp.array(slots, jnp.int32))
    last = last_token_of_each_slot(slots, NUM_SLOTS)
    want = [s if last.get(s) == t else -1 for t, s in enumerate(slots)]
    assert plan.winners.tolist() == want
    assert plan.real.tolist() == [0 <= s < NUM_SLOTS for s in slots]
    assert int(plan.num_dropped) == sum(s >= NUM_SLOTS for s in slots)


def test_the_last_token_of_a_slot_wins_in_a_large_batch():
    slots = np.random.default_rng(0).integers(-50, 900, 700).astype(np.int32)
    plan = plan_append(jnp.asarray(slots), num_pages=50, page_size=PAGE_SIZE)
    last = last_token_of_each_slot(slots, 800)
    want = [s if last.get(s) == t else -1 for t, s in enumerate(slots)]
    assert plan.winners.tolist() == want


@given(run_lists())
@settings(max_examples=100, deadline=None)
def test_items_and_scattered_cover_each_real_token_once(slots):
    plan = tiny_plan(jnp.array(slots, jnp.int32), page_tiles=True)
    winners = plan.winners.tolist()
    covered = plan.scattered.tolist()[: int(plan.num_scattered)]
    pages = []
    for page, first_token, offset, count in plan.page_items.tolist():
        for row in range(offset, offset + count):
            assert winners[first_token + row] == page * PAGE_SIZE + row
            covered.append(first_token + row)
        pages += [page] if count else []
    assert sorted(covered) == np.flatnonzero(plan.real).tolist()
    in_items = set(covered[int(plan.num_scattered) :])
    others = {w // PAGE_SIZE for t, w in enumerate(winners) if t not in in_items}
    assert len(set(pages)) == len(pages)
    assert not set(pages) & (others - {-1})


def test_long_runs_become_items():
    slots = [*range(20, 32), *range(48, 64), *range(MIN_RUN_TOKENS - 1)]
    plan = tiny_plan(jnp.array(slots, jnp.int32), page_tiles=True)
    # page 1 from row 4, so row 0 would be token -4; page 3 whole; page 0 too short
    assert plan.page_items.tolist()[:3] == [[1, -4, 4, 12], [3, 12, 0, 16], [0] * 4]
    assert int(plan.num_scattered) == MIN_RUN_TOKENS - 1


def test_two_runs_in_one_page_are_scattered():
    slots = [*range(8), *range(16, 32), *range(8, 16)]
    plan = tiny_plan(jnp.array(slots, jnp.int32), page_tiles=True)
    assert plan.page_items[:, 3].tolist()[:2] == [16, 0]
    assert int(plan.num_scattered) == 16


def test_runs_past_the_list_are_scattered():
    # 8-token runs, each alone in its page: twice as many as the list has rows
    pages = np.arange(40)
    slots = (pages[:, None] * PAGE_SIZE + np.arange(8)).reshape(-1).astype(np.int32)
    plan = plan_append(
        jnp.asarray(slots), num_pages=40, page_size=PAGE_SIZE, page_tiles=True
    )
    num_items = plan.page_items.shape[0]
    assert plan.page_items[:, 3].tolist() == [8] * num_items
    assert num_items < 40
    assert int(plan.num_scattered) == (40 - num_items) * 8


def test_padding_makes_an_empty_plan():
    plan = tiny_plan(jnp.full(48, -1, jnp.int32), page_tiles=True)
    assert not plan.real.any()
    assert int(plan.num_scattered) == 0
    assert plan.page_items[:, 3].max() == 0


def test_a_decode_step_has_no_items():
    assert tiny_plan(jnp.arange(48, dtype=jnp.int32)).page_items.shape == (0, 4)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (jnp.zeros((2, 2), jnp.int32), "at least one token, got shape"),
        (jnp.zeros(0, jnp.int32), "at least one token, got shape"),
        (jnp.zeros(2, jnp.float32), "slot_mapping to be int32, got float32"),
    ],
)
def test_a_wrong_slot_mapping_is_an_error(slots, message):
    with pytest.raises(ValueError, match=message):
        tiny_plan(slots)
