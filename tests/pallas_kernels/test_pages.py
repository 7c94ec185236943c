"""Pages as opaque things: copies and gathers, reference and Mosaic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import lower_for_h200
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.kv_requantize import plan_requantize, requantize_staged
from pallas_kernels.pages import (
    PAD_SLOT,
    check_page_copies,
    copy_pages,
    gather_sequences,
    make_pages,
    mosaic_gpu,
    page_geometry,
    pages_sharding,
    read_slots,
    reference,
    write_slots,
)
from pallas_kernels.pages.cases import CASES, SMALL_CASES, PagesCase, make_inputs
from pallas_kernels.pages.config import PageTileConfig, heuristic_config
from pallas_kernels.pages.layout import as_bits, from_bits

DTYPES = [FP8_DTYPE, jnp.bfloat16, jnp.float32]
PAGE_SIZE = 16


def tiny_inputs(dtype=FP8_DTYPE, seed: int = 0, **changes):
    shape = {
        "name": "tiny",
        "num_pages": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": PAGE_SIZE,
        "dtype": jnp.dtype(dtype),
        "num_copies": 3,
        "num_seqs": 3,
        "pages_per_seq": 2,
    }
    return make_inputs(PagesCase(**(shape | changes)), seed)


def assert_same_bits(actual, expected) -> None:
    """Compares to the last bit, the two codes of NaN apart."""
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(as_bits(got), as_bits(want), strict=True)


def assert_same_values(actual, expected) -> None:
    """Compares codes with the two bytes of NaN as one, other dtypes to the last bit."""
    for got, want in zip(actual, expected, strict=True):
        got, want = np.asarray(as_bits(got)), np.asarray(as_bits(want))
        if got.dtype == np.uint8:
            got, want = [np.where(x == 0xFF, 0x7F, x) for x in (got, want)]
        np.testing.assert_array_equal(got, want, strict=True)


# Layout


@pytest.mark.parametrize("dtype", DTYPES)
def test_made_pages_are_zero_and_of_one_geometry(dtype):
    k_pages, v_pages = make_pages(3, 2, PAGE_SIZE, 8, dtype)
    geometry = page_geometry(k_pages, v_pages)
    assert geometry == (3, 2, PAGE_SIZE, 8)
    assert geometry.num_slots == 48
    assert k_pages.dtype == v_pages.dtype == dtype
    assert not as_bits(k_pages).any()
    assert not as_bits(v_pages).any()


@pytest.mark.parametrize(
    ("k_shape", "v_shape", "message"),
    [
        ((3, 2, 16), (3, 2, 8, 16), "Expected k_pages to be"),
        ((3, 2, 16, 8), (3, 2, 16, 8), r"Expected v_pages.shape=.* the v_pages of"),
    ],
)
def test_pools_that_do_not_belong_together_are_an_error(k_shape, v_shape, message):
    with pytest.raises(ValueError, match=message):
        page_geometry(jnp.zeros(k_shape, FP8_DTYPE), jnp.zeros(v_shape, FP8_DTYPE))


def test_a_dtype_of_no_pool_is_an_error():
    with pytest.raises(ValueError, match="share one dtype of float8_e4m3fn"):
        make_pages(3, 2, PAGE_SIZE, 8, jnp.float16)


def test_sharding_splits_the_heads_of_both_pools():
    assert pages_sharding("heads") == PartitionSpec(None, "heads", None, None)


# Copies: the reference


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_pages_equal_their_sources_bit_for_bit(dtype):
    inputs = tiny_inputs(dtype)
    k_want, v_want = (
        np.array(as_bits(inputs.k_pages)),
        np.array(as_bits(inputs.v_pages)),
    )
    for source, destination in zip(inputs.sources, inputs.destinations, strict=True):
        if source >= 0 and destination >= 0:
            k_want[destination], v_want[destination] = k_want[source], v_want[source]
    pools = copy_pages(*inputs[:4], implementation="xla")
    assert_same_bits(pools, [from_bits(x, dtype) for x in (k_want, v_want)])
    assert (as_bits(pools[0]) != as_bits(inputs.k_pages)).any()


@pytest.mark.parametrize(
    ("sources", "destinations"), [([-1, 2], [3, -1]), ([-1], [-1]), ([], [])]
)
def test_negative_entries_and_no_entries_copy_nothing(sources, destinations):
    inputs = tiny_inputs()
    lists = [jnp.array(x, jnp.int32) for x in (sources, destinations)]
    assert_same_bits(copy_pages(*inputs[:2], *lists), inputs[:2])


@given(st.permutations(range(6)), st.lists(st.integers(-1, 2), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_any_list_of_copies_matches_a_loop(pages, picks):
    inputs = tiny_inputs()
    sources = np.array([pages[i] if i >= 0 else -1 for i in picks], np.int32)
    destinations = np.array(pages[3:], np.int32)
    check_page_copies(sources, destinations, 6)
    want = [np.array(as_bits(x)) for x in inputs[:2]]
    for source, destination in zip(sources, destinations, strict=True):
        if source >= 0:
            for pool in want:
                pool[destination] = pool[source]
    lists = (jnp.asarray(sources), jnp.asarray(destinations))
    pools = copy_pages(*inputs[:2], *lists, implementation="xla")
    assert_same_bits(pools, [from_bits(x, FP8_DTYPE) for x in want])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_donated_copy_copies_no_pool(dtype):
    inputs = tiny_inputs(dtype, num_pages=64)
    compiled = (
        jax.jit(
            functools.partial(copy_pages, implementation="xla"), donate_argnums=(0, 1)
        )
        .lower(*inputs[:4])
        .compile()
    )
    shapes = [f"[{','.join(map(str, x.shape))}]" for x in inputs[:2]]
    lines = compiled.as_text().splitlines()
    assert not [
        line for line in lines if " copy(" in line and any(s in line for s in shapes)
    ]
    pool_bytes = inputs.k_pages.nbytes + inputs.v_pages.nbytes
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    # XLA views floats as integers through a buffer; a pool widened, or one more copy
    # of it, would not fit into what is left.
    assert memory.temp_size_in_bytes < 1.5 * pool_bytes


def test_a_copied_page_follows_its_rows_through_the_freeze():
    # docs/cases.md row 9: copy the page and its owners, then requantize: both hold the row.
    k_pages, v_pages = make_pages(3, 1, PAGE_SIZE, 8, FP8_DTYPE)
    rows = jax.random.normal(jax.random.key(1), (5, 1, 8), jnp.bfloat16)
    owner = jnp.full((3, PAGE_SIZE), -1, jnp.int32).at[0, :5].set(jnp.arange(5))
    sources, destinations = jnp.array([0]), jnp.array([2])
    k_pages, v_pages = copy_pages(k_pages, v_pages, sources, destinations)
    owner = owner.at[destinations].set(owner[sources]).reshape(-1)
    plan = plan_requantize(owner, page_size=PAGE_SIZE)
    pools = requantize_staged(
        *(k_pages, v_pages, rows, rows, owner, plan), k_inv_scale=3.0, v_inv_scale=5.0
    )
    original = read_slots(*pools, jnp.arange(5))
    copy = read_slots(*pools, 2 * PAGE_SIZE + jnp.arange(5))
    assert_same_bits(copy, original)
    assert np.asarray(original[0], np.float32).any()


# Copies: the check on the host


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([0, 1], [3, 9], r"Expected pages below num_pages=4, got \[9\]"),
        ([7], [1], r"Expected pages below num_pages=4, got \[7\]"),
        ([0, 1], [3, 3], r"Expected distinct destinations, got \[3\]"),
        ([0, 1], [1, 2], r"Expected no destination to be a source too, got \[1\]"),
    ],
)
def test_copies_that_depend_on_their_order_are_errors(sources, destinations, message):
    with pytest.raises(ValueError, match=message):
        check_page_copies(sources, destinations, 4)


def test_entries_that_copy_nothing_are_not_checked():
    check_page_copies([0, -1, 9], [3, 3, -1], 4)


# Gathers: the reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_gather_gives_back_what_was_written(dtype, page_size):
    pools = make_pages(5, 2, page_size, 8, dtype)
    table = np.array([[3, 0], [1, 4]], np.int32)
    num_tokens = 2 * page_size
    bits = jnp.dtype(f"uint{8 * dtype.dtype.itemsize}")
    keys = jax.random.split(jax.random.key(2))
    k, v = [
        from_bits(jax.random.bits(key, (2, num_tokens, 2, 8), bits), dtype)
        for key in keys
    ]
    tokens = np.arange(num_tokens)
    slots = jnp.asarray(table[:, tokens // page_size] * page_size + tokens % page_size)
    rows = [x.reshape(-1, 2, 8) for x in (k, v)]
    pools = write_slots(*pools, *rows, slots.reshape(-1).astype(jnp.int32))
    gathered = gather_sequences(*pools, jnp.asarray(table), implementation="xla")
    assert_same_bits(gathered, (k, v))


def test_padding_slots_write_nothing():
    inputs = tiny_inputs()
    rows = jnp.ones((2, 2, 8), FP8_DTYPE)
    slots = jnp.full(2, PAD_SLOT, jnp.int32)
    assert_same_bits(write_slots(*inputs[:2], rows, rows, slots), inputs[:2])


def test_entries_out_of_range_leave_the_others_alone():
    # docs/cases.md row 27: a block table with garbage past the end.
    inputs = tiny_inputs()
    clean = inputs.block_table.at[:, -1].set(0)
    assert (clean != inputs.block_table).any()
    actual = gather_sequences(*inputs[:2], inputs.block_table, implementation="xla")
    expected = gather_sequences(*inputs[:2], clean, implementation="xla")
    live = [x[:, :PAGE_SIZE] for x in actual]
    assert_same_bits(live, [x[:, :PAGE_SIZE] for x in expected])


@given(st.permutations(range(6)))
@settings(max_examples=30, deadline=None)
def test_permuting_pages_with_their_table_changes_nothing(order):
    inputs = tiny_inputs()
    order = np.array(order)
    places = np.argsort(order).astype(np.int32)  # page order[i] moves to place i
    table = np.array([[0, 5], [2, 2], [4, 1]], np.int32)
    moved = [from_bits(as_bits(x)[order], FP8_DTYPE) for x in inputs[:2]]
    actual = gather_sequences(*moved, jnp.asarray(places[table]), implementation="xla")
    expected = gather_sequences(*inputs[:2], jnp.asarray(table), implementation="xla")
    assert_same_bits(actual, expected)


# Errors


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        (jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 1), jnp.int32), "alike"),
        (jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32), "alike"),
        (jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.int32), "in int32"),
    ],
)
def test_lists_of_copies_that_disagree_are_errors(sources, destinations, message):
    inputs = tiny_inputs()
    with pytest.raises(
        ValueError, match=f"Expected sources and destinations.*{message}"
    ):
        copy_pages(*inputs[:2], sources, destinations)


@pytest.mark.parametrize(
    "table", [jnp.zeros(3, jnp.int32), jnp.zeros((3, 2), jnp.float32)]
)
def test_a_table_of_another_shape_or_dtype_is_an_error(table):
    inputs = tiny_inputs()
    with pytest.raises(ValueError, match="Expected block_table to be int32"):
        gather_sequences(*inputs[:2], table)


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        (jnp.float32, {"page_size": 64, "head_dim": 64}, "got float32"),
        (FP8_DTYPE, {"page_size": 32, "head_dim": 64}, "page_size=32"),
        (FP8_DTYPE, {"page_size": 64, "head_dim": 80}, "head_dim=80"),
    ],
)
def test_mosaic_refuses_what_it_has_no_tile_for(dtype, changes, message):
    inputs = tiny_inputs(dtype, **changes)
    with pytest.raises(NotImplementedError, match=message):
        copy_pages(*inputs[:4], implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=message):
        gather_sequences(*inputs[:2], inputs.block_table, implementation="mosaic_gpu")


def test_tiles_beyond_shared_memory_are_an_error():
    assert heuristic_config(128, 256, 2).gather_bytes == 3 * 128 * 256 * 2 + 1024
    with pytest.raises(ValueError, match="Expected tiles of at most"):
        PageTileConfig(page_size=256, head_dim=256, itemsize=2)


def test_pages_that_are_no_whole_tiles_are_an_error():
    with pytest.raises(ValueError, match="to be multiples of 64"):
        PageTileConfig(page_size=32, head_dim=64, itemsize=1)


# Mosaic in the interpreter


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_interpreted_mosaic_copies_like_the_reference(case):
    arrays = make_inputs(case, 3)[:4]
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    actual = mosaic_gpu.copy_pages(*arrays, interpret=interpret)
    assert_same_bits(actual, reference.copy_pages(*arrays))


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_interpreted_mosaic_gathers_like_the_reference(case):
    inputs = make_inputs(case, 4)
    arrays = (*inputs[:2], inputs.block_table)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    actual = mosaic_gpu.gather_sequences(*arrays, interpret=interpret)
    assert_same_values(actual, reference.gather_sequences(*arrays))


# Mosaic lowered for an H200, without one


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_lowers_for_an_h200(case):
    inputs = jax.eval_shape(lambda: make_inputs(case, 5))
    copy = functools.partial(copy_pages, implementation="mosaic_gpu")
    assert "pages_copy" in lower_for_h200(copy, *inputs[:4])
    gather = functools.partial(gather_sequences, implementation="mosaic_gpu")
    text = lower_for_h200(gather, *inputs[:2], inputs.block_table)
    assert "pages_gather" in text


# Mosaic on the device


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_copies_like_the_reference(case):
    arrays = make_inputs(case, 6)[:4]
    actual = copy_pages(*arrays, implementation="mosaic_gpu")
    assert_same_bits(actual, copy_pages(*arrays, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_gathers_like_the_reference(case):
    inputs = make_inputs(case, 7)
    arrays = (*inputs[:2], inputs.block_table)
    actual = gather_sequences(*arrays, implementation="mosaic_gpu")
    expected = gather_sequences(*arrays, implementation="xla")
    assert_same_values(actual, expected)
