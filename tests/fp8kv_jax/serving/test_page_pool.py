"""Reference counts, and which pages are given up first."""

import pytest

import fp8kv_jax as fp8kv
from fp8kv_jax.serving.page_pool import PagePool, next_key, root_key

KEYS = [bytes([i]) for i in range(8)]


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(2)
    page = pool.take()
    pool.hold(page)
    pool.release(page)
    assert pool.num_used == 1
    pool.release(page)
    assert pool.num_used == 0


def test_an_empty_pool_is_an_error():
    pool = PagePool(1)
    pool.take()
    with pytest.raises(fp8kv.OutOfPagesError, match=r"nobody holds, got none of 1"):
        pool.take()


def test_the_end_of_the_prefix_unused_for_longest_is_given_up_first():
    given_up = []
    pool = PagePool(4, on_evict=lambda page, key: given_up.append((page, key)))
    pages = [pool.take() for _ in range(4)]
    for page, key in zip(pages, KEYS, strict=False):
        pool.publish(page, key)
    for page in (pages[1], pages[0], pages[3], pages[2]):
        pool.release(page)
    pool.hold(pages[1])
    assert [pool.take(), pool.take()] == [pages[0], pages[3]]
    assert given_up == [(pages[0], KEYS[0]), (pages[3], KEYS[3])]
    assert pool.find(KEYS[0]) is None
    assert pool.find(KEYS[2]) == pages[2]
    assert pool.num_evictions == 2


def test_free_pages_are_taken_before_cached_ones():
    pool = PagePool(2)
    page = pool.take()
    pool.publish(page, KEYS[0])
    pool.release(page)
    assert pool.take() != page
    assert pool.find(KEYS[0]) == page


def test_the_first_page_of_a_prefix_is_kept():
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, KEYS[0])
    pool.publish(second, KEYS[0])
    assert pool.find(KEYS[0]) == first
    pool.release(second)
    assert pool.num_idle == 0


def test_a_page_taken_out_of_the_index_is_not_found():
    pool = PagePool(1)
    page = pool.take()
    pool.publish(page, KEYS[0])
    pool.withdraw(page)
    assert pool.find(KEYS[0]) is None
    pool.release(page)
    assert pool.num_idle == 0


def test_nothing_is_found_once_all_is_forgotten():
    pool = PagePool(2)
    held, idle = pool.take(), pool.take()
    pool.publish(held, KEYS[0])
    pool.publish(idle, KEYS[1])
    pool.release(idle)
    pool.forget_all()
    assert pool.find(KEYS[0]) is None
    assert pool.find(KEYS[1]) is None
    assert pool.num_available == 1
    pool.release(held)
    assert pool.num_available == 2


def test_a_key_names_all_tokens_before_it():
    one = next_key(root_key(""), [1, 2])
    assert one != next_key(root_key(""), [1, 3])
    assert one != next_key(root_key("other"), [1, 2])
    assert next_key(one, [3, 4]) != next_key(root_key(""), [3, 4])
