"""The plan of a freeze: which pages it rewrites, and which in one bulk copy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_requantize import plan_requantize
from pallas_kernels.kv_requantize.plan import NO_RUN

PAGE_SIZE = 16
NUM_SLOTS = 4 * PAGE_SIZE
NUM_ROWS = 40

owner_lists = st.lists(
    st.integers(-1, NUM_ROWS - 1), min_size=NUM_SLOTS, max_size=NUM_SLOTS
)


@given(owner_lists, st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_plan_lists_the_pages_with_an_owned_slot(owners, kept):
    owners = np.array(owners, np.int32).reshape(4, PAGE_SIZE)
    owners[np.logical_not(kept)] = -1
    plan = plan_requantize(jnp.asarray(owners.reshape(-1)), page_size=PAGE_SIZE)
    want = [page for page in range(4) if (owners[page] >= 0).any()]
    assert np.asarray(plan.pages)[: plan.count].tolist() == want


def test_plan_of_no_owner_is_empty():
    plan = plan_requantize(jnp.full(NUM_SLOTS, -1, jnp.int32), page_size=PAGE_SIZE)
    assert int(plan.count) == 0


@pytest.mark.parametrize(
    ("owned", "first_row"),
    [
        ({0: 7, 1: 8, 3: 10}, 7),  # 7, 8, a hole, 10: row 7 at offset 0
        ({5: 5, 6: 6}, 0),
        ({5: 4}, -1),  # row -1 would sit at offset 0
        ({0: 7, 1: 7}, NO_RUN),
        ({0: 8, 1: 7}, NO_RUN),
    ],
)
def test_first_row_is_given_for_consecutive_rows_alone(owned, first_row):
    owners = np.full(NUM_SLOTS, -1, np.int32)
    for offset, row in owned.items():
        owners[PAGE_SIZE + offset] = row
    plan = plan_requantize(jnp.asarray(owners), page_size=PAGE_SIZE)
    assert (int(plan.pages[0]), int(plan.first_rows[0])) == (1, first_row)


@pytest.mark.parametrize(
    ("owners", "page_size", "message"),
    [
        (jnp.zeros((4, 4), jnp.int32), 4, r"Expected slot_owner to be int32"),
        (jnp.zeros(16, jnp.float32), 4, r"Expected slot_owner to be int32"),
        (jnp.zeros(16, jnp.int32), 5, "to be a whole number of pages"),
    ],
)
def test_owners_that_are_no_pages_are_an_error(owners, page_size, message):
    with pytest.raises(ValueError, match=message):
        plan_requantize(owners, page_size=page_size)
