"""Requantization: the reference against loops, Mosaic against the reference."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from h200 import lower_for_h200
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8 import FP8_DTYPE, quantize_rows
from pallas_kernels.kv_requantize import (
    mosaic_gpu,
    plan_requantize,
    reference,
    requantize_pages,
    requantize_staged,
)
from pallas_kernels.kv_requantize.cases import (
    CASES,
    SMALL_CASES,
    RequantizeCase,
    RequantizeInputs,
    make_inputs,
)
from pallas_kernels.kv_requantize.config import MAX_PROGRAMS_PER_SM as MAX_PROGRAMS
from pallas_kernels.kv_requantize.config import (
    SHARED_MEMORY_BYTES,
    RequantizeConfig,
    heuristic_config,
    tile_bytes,
)
from pallas_kernels.pages.layout import as_bits, from_bits, make_pages, read_slots

PAGE_SIZE = 16
NUM_SLOTS = 4 * PAGE_SIZE
NUM_ROWS = 40


def tiny_case(**changes) -> RequantizeCase:
    shape = {
        "name": "tiny",
        "num_pages": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": PAGE_SIZE,
        "num_rows": NUM_ROWS,
        "ownership": "mixed",
        "per_head": True,
    }
    return RequantizeCase(**(shape | changes))


def staged_arguments(inputs: RequantizeInputs):
    page_size = inputs.k_pages.shape[2]
    plan = plan_requantize(inputs.slot_owner, page_size=page_size)
    arrays = (*inputs[:5], plan)
    scales = {"k_inv_scale": inputs.k_inv_scale, "v_inv_scale": inputs.v_inv_scale}
    return arrays, scales


def page_scales(inputs: RequantizeInputs):
    names = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale")
    return {name: getattr(inputs, name) for name in names}


def per_head(inputs: RequantizeInputs, scales):
    num_kv_heads = inputs.k_pages.shape[1]
    return {name: jnp.broadcast_to(x, num_kv_heads) for name, x in scales.items()}


def codes_of(pool) -> np.ndarray:
    """Bytes of a pool; NaN has two, which count as one."""
    codes = np.asarray(as_bits(pool))
    return np.where(codes == 0xFF, 0x7F, codes)


def assert_same_codes(actual, expected) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert (codes_of(got) != codes_of(want)).sum() == 0


def quantize_with_numpy(x, scales) -> np.ndarray:
    y = np.asarray(x, np.float32)
    for scale in scales:
        y = y * np.float32(scale)
    return np.clip(y, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def requantize_with_a_loop(inputs: RequantizeInputs):
    k_pages = np.array(as_bits(inputs.k_pages))
    v_pages = np.array(as_bits(inputs.v_pages))
    num_kv_heads, page_size = k_pages.shape[1:3]
    k_inv = np.broadcast_to(inputs.k_inv_scale, num_kv_heads)
    v_inv = np.broadcast_to(inputs.v_inv_scale, num_kv_heads)
    staged_k = np.asarray(inputs.staged_k, np.float32)
    staged_v = np.asarray(inputs.staged_v, np.float32)
    for slot, row in enumerate(np.asarray(inputs.slot_owner)):
        if row < 0:
            continue
        page, offset = divmod(slot, page_size)
        for head in range(num_kv_heads):
            k = quantize_with_numpy(staged_k[row, head], [k_inv[head]])
            v = quantize_with_numpy(staged_v[row, head], [v_inv[head]])
            k_pages[page, head, offset] = k.view(np.uint8)
            v_pages[page, head, :, offset] = v.view(np.uint8)
    return from_bits(k_pages, FP8_DTYPE), from_bits(v_pages, FP8_DTYPE)


owner_lists = st.lists(
    st.integers(-1, NUM_ROWS - 1), min_size=NUM_SLOTS, max_size=NUM_SLOTS
)


# The reference


@pytest.mark.parametrize(
    ("ownership", "page_size", "granularity"),
    [
        ("prefill", 16, "head"),
        ("decode", 32, "tensor"),
        ("mixed", 64, "head"),
        ("copied", 16, "tensor"),
    ],
)
def test_owned_slots_hold_their_quantized_rows(ownership, page_size, granularity):
    case = tiny_case(
        ownership=ownership, page_size=page_size, per_head=granularity == "head"
    )
    inputs = make_inputs(case, 1)
    arrays, scales = staged_arguments(inputs)
    actual = requantize_staged(*arrays, **scales, implementation="xla")
    assert_same_codes(actual, requantize_with_a_loop(inputs))


@given(owner_lists)
@settings(max_examples=30, deadline=None)
def test_any_ownership_matches_a_loop(owners):
    inputs = make_inputs(tiny_case(), 2)
    inputs = inputs._replace(slot_owner=jnp.array(owners, jnp.int32))
    arrays, scales = staged_arguments(inputs)
    actual = requantize_staged(*arrays, **scales, implementation="xla")
    assert_same_codes(actual, requantize_with_a_loop(inputs))


def test_unowned_slots_keep_their_bytes():
    inputs = make_inputs(tiny_case(), 3)
    arrays, scales = staged_arguments(inputs)
    before = read_slots(inputs.k_pages, inputs.v_pages, jnp.arange(NUM_SLOTS))
    pools = requantize_staged(*arrays, **scales, implementation="xla")
    after = read_slots(*pools, jnp.arange(NUM_SLOTS))
    unowned = np.asarray(inputs.slot_owner) < 0
    for old, new in zip(before, after, strict=True):
        # Not folded: both bytes of NaN are in the pool, and each must stay.
        np.testing.assert_array_equal(as_bits(old)[unowned], as_bits(new)[unowned])


def test_nothing_owned_changes_nothing():
    inputs = make_inputs(tiny_case(ownership="nothing"), 4)
    arrays, scales = staged_arguments(inputs)
    pools = requantize_staged(*arrays, **scales, implementation="xla")
    for old, new in zip(inputs[:2], pools, strict=True):
        np.testing.assert_array_equal(as_bits(old), as_bits(new))


def test_a_stage_without_rows_changes_nothing():
    inputs = make_inputs(tiny_case(ownership="nothing"), 4)
    arrays, scales = staged_arguments(inputs)
    none = jnp.zeros((0, *inputs.staged_k.shape[1:]), jnp.bfloat16)
    pools = requantize_staged(*arrays[:2], none, none, *arrays[4:], **scales)
    assert_same_codes(pools, inputs[:2])


def test_a_copied_page_is_requantized_too():
    # docs/cases.md row 9: a page copied before the freeze owns the rows of its source.
    inputs = make_inputs(tiny_case(ownership="copied"), 5)
    owners = np.asarray(inputs.slot_owner).reshape(4, PAGE_SIZE)
    copies = [
        (a, b) for a in range(4) for b in range(a) if (owners[a] == owners[b]).all()
    ]
    arrays, scales = staged_arguments(inputs)
    k_pages, v_pages = requantize_staged(*arrays, **scales, implementation="xla")
    assert copies
    for a, b in copies:
        live = owners[a] >= 0
        np.testing.assert_array_equal(
            codes_of(k_pages)[a][:, live], codes_of(k_pages)[b][:, live]
        )
        np.testing.assert_array_equal(
            codes_of(v_pages)[a][..., live], codes_of(v_pages)[b][..., live]
        )


def test_inf_saturates_and_nan_stays_nan_in_its_own_slot():
    k_pages, v_pages = make_pages(1, 1, PAGE_SIZE, 8, FP8_DTYPE)
    rows = jnp.ones((2, 1, 8), jnp.bfloat16)
    rows = rows.at[0, 0, :3].set(jnp.array([jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16))
    slot_owner = jnp.full(PAGE_SIZE, -1, jnp.int32).at[4].set(0).at[5].set(1)
    pools = requantize_staged(
        *(k_pages, v_pages, rows, rows, slot_owner),
        plan_requantize(slot_owner, page_size=PAGE_SIZE),
        k_inv_scale=1.0,
        v_inv_scale=1.0,
    )
    for x in read_slots(*pools, jnp.array([4, 5])):
        x = np.asarray(x, np.float32)[:, 0]
        np.testing.assert_array_equal(x[0, :4], [448, -448, np.nan, 1])
        np.testing.assert_array_equal(x[1], np.ones(8))


def pool_copies(compiled, shape) -> list[str]:
    sizes = ",".join(map(str, shape))
    lines = compiled.as_text().splitlines()
    return [line for line in lines if " copy(" in line and f"[{sizes}]" in line]


def test_the_branch_of_a_cond_copies_no_pool():
    inputs = make_inputs(tiny_case(num_pages=64, num_rows=100), 6)
    arrays, scales = staged_arguments(inputs)

    def step(k_pages, v_pages, complete, rest, scales):
        def rewrite(pools):
            return requantize_staged(*pools, *rest, **scales, implementation="xla")

        return jax.lax.cond(complete, rewrite, lambda pools: pools, (k_pages, v_pages))

    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(*arrays[:2], jnp.array(True), arrays[2:], scales)
        .compile()
    )
    assert pool_copies(compiled, inputs.k_pages.shape) == []
    assert pool_copies(compiled, inputs.v_pages.shape) == []
    memory, pool_bytes = compiled.memory_analysis(), 2 * inputs.k_pages.size
    assert memory.alias_size_in_bytes == pool_bytes
    # XLA views codes as integers through a buffer; a pool widened to 16 bits, or one
    # more copy of it, would not fit into what is left.
    assert memory.temp_size_in_bytes < 1.5 * pool_bytes


# FP8 to FP8


def all_codes(num_kv_heads: int):
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 1, 16, 16)
    codes = jnp.broadcast_to(codes, (3, num_kv_heads, 16, 16))
    return from_bits(codes, FP8_DTYPE)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("constant", [True, False])
def test_every_code_moves_through_two_products(num_kv_heads, constant):
    # 0.7 and 1.3 fold into one float32 factor that rounds otherwise: the barrier
    # must hold whether the scales are constants of the jit or arguments.
    pool = all_codes(num_kv_heads)
    scale, inv_scale = 0.7, 1.3

    def move(pool, scale, inv_scale):
        return requantize_pages(
            *(pool, pool),
            k_scale=scale,
            v_scale=inv_scale,
            k_inv_scale=inv_scale,
            v_inv_scale=scale,
            implementation="xla",
        )

    if constant:
        constants = functools.partial(move, scale=scale, inv_scale=inv_scale)
        actual = jax.jit(constants)(pool)
    else:
        actual = jax.jit(move)(pool, scale, inv_scale)
    x = np.asarray(pool).astype(np.float32)
    k_want = quantize_with_numpy(x, [scale, inv_scale]).view(np.uint8)
    v_want = quantize_with_numpy(x, [inv_scale, scale]).view(np.uint8)
    want = [from_bits(codes, FP8_DTYPE) for codes in (k_want, v_want)]
    assert_same_codes(actual, want)


def test_nan_codes_stay_nan():
    pool = all_codes(1)
    scales = dict.fromkeys(("k_scale", "v_scale", "k_inv_scale", "v_inv_scale"), 2.0)
    for moved in requantize_pages(pool, pool, **scales, implementation="xla"):
        np.testing.assert_array_equal(
            np.isnan(np.asarray(moved, np.float32)),
            np.isnan(np.asarray(pool, np.float32)),
        )


def test_equal_scales_are_the_identity_on_finite_codes():
    pool = all_codes(2)
    scales = {"k_scale": 4.0, "k_inv_scale": 0.25, "v_scale": 0.5, "v_inv_scale": 2.0}
    assert_same_codes(requantize_pages(pool, pool, **scales), (pool, pool))


def test_pages_outside_the_mask_keep_their_bytes():
    inputs = make_inputs(tiny_case(num_pages=8), 7)
    mask = np.asarray(inputs.page_mask)
    assert 0 < mask.sum() < 8
    scales = page_scales(inputs)
    masked = requantize_pages(
        *inputs[:2], **scales, page_mask=inputs.page_mask, implementation="xla"
    )
    whole = requantize_pages(*inputs[:2], **scales, implementation="xla")
    for old, got, full in zip(inputs[:2], masked, whole, strict=True):
        np.testing.assert_array_equal(as_bits(got)[~mask], as_bits(old)[~mask])
        np.testing.assert_array_equal(as_bits(got)[mask], as_bits(full)[mask])


# Errors


def bad_staged_calls():
    arrays, scales = staged_arguments(make_inputs(tiny_case(), 8))
    k_pages, v_pages, staged_k, staged_v, slot_owner, plan = arrays
    other_plan = plan_requantize(slot_owner, page_size=32)
    bfloat16 = [x.astype(jnp.bfloat16) for x in (k_pages, v_pages)]
    return [
        ((*bfloat16, *arrays[2:]), scales, "Expected float8_e4m3fn pools"),
        (
            (k_pages, v_pages, staged_k[:, :1], staged_v, slot_owner, plan),
            scales,
            r"Expected staged_k.shape=.* the num_kv_heads and head_dim of k_pages",
        ),
        (
            (k_pages, v_pages, staged_k, staged_v[:3], slot_owner, plan),
            scales,
            r"Expected staged_v.shape=.* to equal staged_k.shape",
        ),
        (
            (k_pages, v_pages, staged_k.astype(jnp.float32), *arrays[3:]),
            scales,
            "Expected staged rows in bfloat16",
        ),
        (
            (*arrays[:4], slot_owner[:-1], plan),
            scales,
            r"Expected slot_owner to be int32 \[64\]",
        ),
        (
            (*arrays[:5], other_plan),
            scales,
            "Expected plan.pages.shape=.* plan with page_size=16",
        ),
        (
            arrays,
            scales | {"k_inv_scale": jnp.ones(3)},
            "Expected k_inv_scale to be one value or one per KV head",
        ),
    ]


@pytest.mark.parametrize("index", range(7))
def test_arguments_that_disagree_are_errors(index):
    arrays, scales, message = bad_staged_calls()[index]
    with pytest.raises(ValueError, match=message):
        requantize_staged(*arrays, **scales)


def test_a_mask_of_another_shape_is_an_error():
    inputs = make_inputs(tiny_case(), 9)
    with pytest.raises(ValueError, match=r"Expected page_mask to be bool \[4\]"):
        requantize_pages(
            *inputs[:2], **page_scales(inputs), page_mask=inputs.page_mask[:2]
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"page_size": 16}, "page_size=16"), ({"head_dim": 80}, "head_dim=80")],
)
def test_mosaic_refuses_what_it_has_no_tile_for(changes, message):
    inputs = make_inputs(tiny_case(**{"page_size": 64, **changes}), 10)
    arrays, scales = staged_arguments(inputs)
    with pytest.raises(NotImplementedError, match=message):
        requantize_staged(*arrays, **scales, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=message):
        requantize_pages(
            *inputs[:2], **page_scales(inputs), implementation="mosaic_gpu"
        )


def test_too_many_programs_for_an_sm_are_an_error():
    for page_size in (64, 128):
        best = heuristic_config(page_size)
        assert best.programs_per_sm * tile_bytes(page_size) <= SHARED_MEMORY_BYTES
        with pytest.raises(ValueError, match="with tiles of at most"):
            RequantizeConfig(page_size=page_size, programs_per_sm=MAX_PROGRAMS + 1)
    with pytest.raises(ValueError, match="with tiles of at most"):
        RequantizeConfig(page_size=512, programs_per_sm=MAX_PROGRAMS)


# Mosaic in the interpreter


def few_programs(case: RequantizeCase) -> RequantizeConfig:
    return RequantizeConfig(page_size=case.page_size, num_sms=2, programs_per_sm=1)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_interpreted_mosaic_rewrites_slots_like_the_reference(case):
    inputs = make_inputs(case, 11)
    arrays, scales = staged_arguments(inputs)
    scales = per_head(inputs, scales)
    actual = mosaic_gpu.requantize_staged(
        *arrays,
        **scales,
        config=few_programs(case),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert_same_codes(actual, reference.requantize_staged(*arrays, **scales))


@pytest.mark.parametrize("case", SMALL_CASES[::2], ids=lambda case: case.name)
@pytest.mark.parametrize("masked", [True, False])
def test_interpreted_mosaic_rescales_pages_like_the_reference(case, masked):
    inputs = make_inputs(case, 12)
    mask = inputs.page_mask.at[0].set(True) if masked else None
    arguments = (*inputs[:2], mask)
    scales = per_head(inputs, page_scales(inputs))
    actual = mosaic_gpu.requantize_pages(
        *arguments,
        **scales,
        config=few_programs(case),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert_same_codes(actual, reference.requantize_pages(*arguments, **scales))


# Mosaic lowered for an H200, without one


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_lowers_for_an_h200(case):
    inputs, (arrays, scales) = jax.eval_shape(
        lambda: (make_inputs(case, 13), staged_arguments(make_inputs(case, 13)))
    )
    staged = functools.partial(requantize_staged, implementation="mosaic_gpu")
    assert "kv_requantize_staged" in lower_for_h200(staged, *arrays, **scales)
    pages = functools.partial(requantize_pages, implementation="mosaic_gpu")
    text = lower_for_h200(
        *(pages, *inputs[:2]), **page_scales(inputs), page_mask=inputs.page_mask
    )
    assert "kv_requantize_pages" in text


# Mosaic on the device


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_rewrites_slots_like_the_reference(case):
    arrays, scales = staged_arguments(make_inputs(case, 14))
    actual = requantize_staged(*arrays, **scales, implementation="mosaic_gpu")
    expected = requantize_staged(*arrays, **scales, implementation="xla")
    assert_same_codes(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_rescales_pages_like_the_reference(case):
    inputs = make_inputs(case, 15)
    call = functools.partial(
        requantize_pages,
        *inputs[:2],
        **page_scales(inputs),
        page_mask=inputs.page_mask,
    )
    actual = call(implementation="mosaic_gpu")
    assert_same_codes(actual, call(implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_codes_made_in_the_same_jit_are_rescaled_as_codes(implementation):
    # XLA on the GPU deletes a quantize-dequantize round trip: the product would then
    # see the rows before they were rounded.
    rows = 3 * jax.random.normal(jax.random.key(16), (4, 64, 2, 64), jnp.float32)

    def quantize(rows):
        codes = quantize_rows(rows, jnp.ones(2, jnp.float32))
        return codes.transpose(0, 2, 1, 3), codes.transpose(0, 2, 3, 1)

    def rescale(k_pages, v_pages):
        scales = {"k_scale": 1.1, "v_scale": 1.3}
        inv_scales = {"k_inv_scale": 0.7, "v_inv_scale": 0.9}
        return requantize_pages(
            k_pages, v_pages, **scales, **inv_scales, implementation=implementation
        )

    at_once = jax.jit(lambda rows: rescale(*quantize(rows)))(rows)
    assert_same_codes(at_once, rescale(*jax.jit(quantize)(rows)))
