"""Pages by sequence, and batches laid out over them."""

import numpy as np
import pytest

import fp8kv_jax as fp8kv


def make_table(**changes):
    sizes = {"num_pages": 4, "page_size": 8, "num_seqs": 2, "max_seq_len": 24}
    return fp8kv.BlockTable(**(sizes | changes))


def test_slots_follow_the_pages_of_a_sequence():
    table = make_table()
    table.grow(1, 9)
    table.grow(0, 1)
    first, second = table.pages(1)
    np.testing.assert_array_equal(table.slots(1, 7, 2), [first * 8 + 7, second * 8])
    assert len({*table.pages(0), *table.pages(1)}) == 3


def test_freed_pages_are_used_again():
    table = make_table()
    table.grow(0, 24)
    table.free(0)
    assert table.num_free_pages == 4
    table.grow(1, 24)
    assert len(set(table.pages(1))) == 3


def test_an_exhausted_pool_takes_nothing():
    table = make_table()
    table.grow(0, 24)
    with pytest.raises(fp8kv.OutOfPagesError, match=r"Expected 3 free pages .* got 1"):
        table.grow(1, 17)
    assert table.pages(1) == ()
    assert table.num_free_pages == 1


def test_a_sequence_wider_than_the_table_is_refused():
    with pytest.raises(ValueError, match=r"at most 24 tokens.*got 25"):
        make_table().grow(0, 25)


def test_a_batch_pads_short_sequences_and_missing_rows():
    table = make_table()
    batch = fp8kv.make_batch(
        table, {1: [5, 6, 7], 0: [9]}, {1: 0, 0: 0}, num_queries=4, num_seqs=3
    )
    slots = np.asarray(batch.slot_mapping)
    assert (slots >= 0).sum(axis=1).tolist() == [3, 1, 0]
    assert batch.seq_lens.tolist() == [3, 1, 0]
    assert batch.last_query.tolist() == [2, 0, 0]
    assert batch.positions.tolist()[0] == [0, 1, 2, 3]
    assert batch.block_table.shape == (3, 3)
