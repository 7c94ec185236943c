"""The plan of an append: who wins a slot, and which kernel writes whom."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_append import plan as plan_module
from pallas_kernels.kv_append import plan_append
from pallas_kernels.kv_append.config import BLOCK_TOKENS
from pallas_kernels.kv_append.plan import OVERRULED

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
    assert_covers_each_real_token_once(plan, slots)


def scattered_tokens(plan) -> list[int]:
    """Tokens that the blocks of a plan lead to."""
    blocks = np.asarray(plan.blocks[: int(plan.num_blocks)])
    tokens = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    tokens = tokens[tokens < plan.scattered.size]
    return tokens[np.asarray(plan.scattered)[tokens] != -1].tolist()


def assert_covers_each_real_token_once(plan, slots) -> None:
    winners = plan.winners.tolist()
    covered, pages = [], []
    for page, first_token, offset, count in plan.page_items[
        : int(plan.num_items)
    ].tolist():
        assert count >= BLOCK_TOKENS
        for row in range(offset, offset + count):
            assert winners[first_token + row] == page * PAGE_SIZE + row
            covered.append(first_token + row)
        pages.append(page)
    scattered = scattered_tokens(plan)
    for token in scattered:
        want = OVERRULED if winners[token] < 0 else winners[token]
        assert plan.scattered[token] == want
    assert sorted(covered + scattered) == np.flatnonzero(plan.real).tolist()
    assert len(set(pages)) == len(pages)
    assert not set(pages) & {slots[token] // PAGE_SIZE for token in scattered}


@given(run_lists())
@settings(max_examples=100, deadline=None)
def test_items_and_scattered_cover_each_real_token_once(slots):
    plan = tiny_plan(jnp.array(slots, jnp.int32), page_tiles=True)
    assert_covers_each_real_token_once(plan, slots)


@given(run_lists())
@settings(max_examples=50, deadline=None)
def test_comparing_pairs_and_scattering_make_one_plan(slots):
    mapping = jnp.array(slots, jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_PAIRWISE_TOKENS", 0)
        scattering = plan_append.__wrapped__(
            mapping, num_pages=NUM_PAGES, page_size=PAGE_SIZE, page_tiles=True
        )
    pairs = tiny_plan(mapping, page_tiles=True)
    used = {"page_items": int(pairs.num_items), "blocks": int(pairs.num_blocks)}
    for name, want in pairs._asdict().items():
        got = getattr(scattering, name)
        if name in used:
            want, got = want[: used[name]], got[: used[name]]
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_long_runs_become_items():
    slots = [*range(20, 32), *range(48, 64), *range(BLOCK_TOKENS - 1)]
    plan = tiny_plan(jnp.array(slots, jnp.int32), page_tiles=True)
    # page 1 from row 4, so row 0 would be token -4; page 3 whole; page 0 too short
    assert plan.page_items.tolist()[:2] == [[1, -4, 4, 12], [3, 12, 0, 16]]
    assert int(plan.num_items) == 2
    assert len(scattered_tokens(plan)) == BLOCK_TOKENS - 1


def test_two_runs_in_one_page_are_scattered():
    slots = [*range(8), *range(16, 32), *range(8, 16)]
    plan = tiny_plan(jnp.array(slots, jnp.int32), page_tiles=True)
    assert plan.page_items[:1].tolist() == [[1, 8, 0, 16]]
    assert int(plan.num_items) == 1
    assert len(scattered_tokens(plan)) == 16


def test_the_list_has_room_for_the_shortest_runs():
    pages = np.arange(40)
    slots = (pages[:, None] * PAGE_SIZE + np.arange(8)).reshape(-1).astype(np.int32)
    plan = plan_append(
        jnp.asarray(slots), num_pages=40, page_size=PAGE_SIZE, page_tiles=True
    )
    assert plan.page_items[:, 3].tolist() == [8] * 40
    assert int(plan.num_items) == 40
    assert int(plan.num_blocks) == 0


def test_padding_makes_an_empty_plan():
    plan = tiny_plan(jnp.full(48, -1, jnp.int32), page_tiles=True)
    assert not plan.real.any()
    assert int(plan.num_items) == int(plan.num_blocks) == 0


def test_a_decode_step_has_no_items():
    plan = tiny_plan(jnp.arange(48, dtype=jnp.int32))
    assert plan.page_items.size == plan.blocks.size == plan.scattered.size == 0


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
