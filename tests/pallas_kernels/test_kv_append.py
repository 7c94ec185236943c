"""kv_append: the reference against loops, Mosaic against the reference."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from h200 import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.kv_append import kv_append, mosaic_gpu, plan_append, reference
from pallas_kernels.kv_append.cases import CASES, AppendCase, AppendInputs, make_inputs
from pallas_kernels.kv_append.config import AppendConfig, choose_config
from pallas_kernels.pages.layout import PageGeometry, as_bits, make_pages, read_slots

_CONFIG = {"heads_per_program": 1, "num_stages": 1, "num_programs": 1}
PAGE_SIZE = 16
NUM_PAGES = 4
NUM_SLOTS = NUM_PAGES * PAGE_SIZE

append_with_xla = jax.jit(reference.kv_append, static_argnames="statistics")
append_with_mosaic = jax.jit(
    mosaic_gpu.kv_append, static_argnames=("statistics", "config", "interpret")
)
tiny_plan = functools.partial(plan_append, num_pages=NUM_PAGES, page_size=PAGE_SIZE)


def small_case(**changes) -> AppendCase:
    shape = {
        "name": "small",
        "num_pages": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 64,
        "num_tokens": 6,
        "slots": "duplicates",
    }
    return AppendCase(**(shape | changes))


def append_rows(k, slots, *, v=None, inv_scale=1.0, pools=None, **kwargs):
    """Appends `[num_tokens, num_kv_heads, head_dim]` rows to small FP8 pools."""
    v = k if v is None else v
    if pools is None:
        pools = make_pages(NUM_PAGES, k.shape[1], PAGE_SIZE, k.shape[2], FP8_DTYPE)
    plan = tiny_plan(jnp.array(slots, jnp.int32))
    scales = {"k_inv_scale": inv_scale, "v_inv_scale": inv_scale}
    return kv_append(*pools, k, v, plan, **(scales | kwargs))


def codes_of(pool) -> np.ndarray:
    """Bits of a pool; FP8 has two bytes for NaN, which count as one."""
    codes = np.asarray(as_bits(pool))
    return np.where(codes == 0xFF, 0x7F, codes) if codes.itemsize == 1 else codes


def assert_same_pools(actual, expected) -> None:
    for got, want in zip(actual[:2], expected[:2], strict=True):
        assert (codes_of(got) != codes_of(want)).sum() == 0


def assert_same_statistics(actual, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# The reference


def quantize_with_numpy(x: np.ndarray, inv_scale: np.ndarray) -> np.ndarray:
    y = np.asarray(x, np.float32) * np.asarray(inv_scale)[:, None]
    return np.clip(y, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def append_with_a_loop(inputs: AppendInputs, cast):
    k_pages, v_pages = np.array(inputs.k_pages), np.array(inputs.v_pages)
    page_size = k_pages.shape[2]
    for token, slot in enumerate(np.asarray(inputs.slot_mapping)):
        if 0 <= slot < k_pages.shape[0] * page_size:
            page, offset = divmod(slot, page_size)
            k_pages[page, :, offset] = cast(inputs.k[token], inputs.k_inv_scale)
            v_pages[page, :, :, offset] = cast(inputs.v[token], inputs.v_inv_scale)
    return jnp.asarray(k_pages), jnp.asarray(v_pages)


def run(implementation, inputs: AppendInputs, *, page_tiles=None, **kwargs):
    num_pages, _, page_size, _ = inputs.k_pages.shape
    plan = plan_append(
        inputs.slot_mapping,
        num_pages=num_pages,
        page_size=page_size,
        page_tiles=page_tiles,
    )
    inv_scales = () if inputs.k_inv_scale is None else inputs[5:]
    return implementation(*inputs[:4], plan, inv_scales, **kwargs)


@pytest.mark.parametrize("slots", ["decode", "duplicates", "mixed", "past_pool"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_slots_hold_their_quantized_rows(slots, page_size):
    case = small_case(num_tokens=40, num_pages=8, slots=slots, page_size=page_size)
    inputs = make_inputs(case, 1)
    actual = run(append_with_xla, inputs, statistics=False)
    assert_same_pools(actual, append_with_a_loop(inputs, quantize_with_numpy))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_other_pools_hold_the_rows_cast(dtype):
    inputs = make_inputs(small_case(num_tokens=40, dtype=dtype), 1)
    expected = append_with_a_loop(inputs, lambda x, _: np.asarray(x).astype(dtype))
    assert_same_pools(run(append_with_xla, inputs, statistics=False), expected)


def test_padding_slots_write_nothing_and_count_nothing():
    # docs/cases.md row 6: half the rows are padding with garbage values.
    k = jnp.array([1.0, 1e4, 2.0, jnp.nan]).reshape(4, 1, 1)
    k_pages, v_pages, (k_stats, v_stats) = append_rows(
        k, [5, -1, 9, -7], statistics=True
    )
    assert np.flatnonzero(k_pages.astype(jnp.float32)).tolist() == [5, 9]
    assert np.flatnonzero(v_pages.astype(jnp.float32)).tolist() == [5, 9]
    for statistics in (k_stats, v_stats):
        assert [x.item() for x in statistics] == [2.0, 0, 0, 0]


def test_losers_of_a_slot_are_observed_but_not_written():
    # docs/cases.md row 8: duplicate slots in one batch, the last token wins.
    k = jnp.array([500.0, 3.0, 7.0, 2.0]).reshape(4, 1, 1)
    k_pages, v_pages, statistics = append_rows(k, [6, 6, 1, 6], statistics=True)
    assert [x.item() for x in read_slots(k_pages, v_pages, jnp.array([6]))] == [2, 2]
    for side in statistics:
        assert [x.item() for x in side] == [500.0, 1, 0, 0]


def test_inf_saturates_in_its_own_slot_and_stays_out_of_the_amax():
    # docs/cases.md row 11: one Inf element.
    k = jnp.array([[3.0, jnp.inf], [-jnp.inf, 5.0]]).reshape(2, 1, 2)
    k_pages, _, (statistics, _) = append_rows(k, [0, 1], statistics=True)
    assert k_pages[0, 0, :2].tolist() == [[3, 448], [-448, 5]]
    assert [x.item() for x in statistics] == [5.0, 0, 0, 2]


def test_values_up_to_464_clip_without_being_counted():
    # docs/cases.md row 16: K = 500 at scale 1; 464; 465.
    k = jnp.array([500.0, 464.0, 465.0, -466.0, 448.0]).reshape(5, 1, 1)
    k_pages, _, (statistics, _) = append_rows(k, range(5), statistics=True)
    assert k_pages[0, 0, :5, 0].tolist() == [448, 448, 448, -448, 448]
    assert [x.item() for x in statistics] == [500.0, 3, 0, 0]


def test_nan_becomes_nan_and_touches_no_other_slot():
    # docs/cases.md row 17: NaN in K.
    k = jnp.array([1.0, jnp.nan, 2.0]).reshape(3, 1, 1)
    k_pages, v_pages, (statistics, _) = append_rows(k, [0, 1, 2], statistics=True)
    codes = k_pages[0, 0, :3, 0].astype(jnp.float32)
    np.testing.assert_array_equal(codes, [1, np.nan, 2])
    assert np.isnan(k_pages.astype(jnp.float32)).sum() == 1
    assert np.isnan(v_pages.astype(jnp.float32)).sum() == 1
    assert [x.item() for x in statistics] == [2.0, 0, 0, 1]


def test_saturated_counts_are_exact_per_head():
    # docs/cases.md row 22: V rows at 600, scale 1.
    k = jnp.ones((3, 2, 4))
    v = k.at[:, 1].set(600.0).at[0, 0, 0].set(-600.0)
    *_, (k_stats, v_stats) = append_rows(k, [3, 4, 60], v=v, statistics=True)
    assert k_stats.num_saturated.tolist() == [0, 0]
    assert v_stats.num_saturated.tolist() == [1, 12]


def test_underflowed_counts_what_rounds_to_zero():
    k = jnp.array([2.0**-10, 2.0**-10 * 1.01, 0.0, -(2.0**-12)]).reshape(4, 1, 1)
    k_pages, _, (statistics, _) = append_rows(k, range(4), statistics=True)
    assert k_pages[0, 0, :4, 0].tolist() == [0, 2.0**-9, 0, 0]
    assert statistics.num_underflowed.tolist() == [2]


def test_k_and_v_take_their_own_scale_per_head():
    k = jnp.ones((1, 2, 4))
    scales = {"k_inv_scale": jnp.array([2.0, 4.0]), "v_inv_scale": jnp.array(8.0)}
    k_pages, v_pages, _ = append_rows(k, [0], **scales)
    assert k_pages[0, :, 0, 0].tolist() == [2, 4]
    assert v_pages[0, :, 0, 0].tolist() == [8, 8]


def compile_donated(inputs: AppendInputs):
    def append(k_pages, v_pages, *others):
        inputs = AppendInputs(k_pages, v_pages, *others)
        return run(append_by_name, inputs, statistics=True)

    return jax.jit(append, donate_argnums=(0, 1)).lower(*inputs).compile()


def append_by_name(*args, **kwargs):
    """The public op, called as implementations are."""
    k_inv_scale, v_inv_scale = args[5]
    scales = {"k_inv_scale": k_inv_scale, "v_inv_scale": v_inv_scale}
    return kv_append(*args[:5], **scales, **kwargs)


def pool_copies(compiled, inputs: AppendInputs) -> list[str]:
    """Copies and conversions of a pool in the optimized program."""
    shape = re.escape(str(list(inputs.k_pages.shape)).replace(" ", ""))
    return re.findall(rf"= \w+{shape}\S* copy\(.*", compiled.as_text())


def test_donated_pools_are_written_in_place():
    inputs = make_inputs(small_case(num_tokens=40, num_pages=64), 0)
    compiled = compile_donated(inputs)
    assert not pool_copies(compiled, inputs)
    pool_bytes = inputs.k_pages.size
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * pool_bytes


def test_another_slot_mapping_compiles_nothing():
    k = jnp.ones((4, 1, 8))
    append_rows(k, [1, 2, 3, -1])
    before = plan_append._cache_size(), kv_append._cache_size()
    append_rows(k, [9, 9, 70, 4])
    assert (plan_append._cache_size(), kv_append._cache_size()) == before


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": jnp.ones((2, 1, 9))}, re.escape("v.shape to be (2, 1, 8)")),
        ({"v": jnp.ones((2, 1, 8), jnp.bfloat16)}, "share one dtype of bfloat16"),
        ({"k_inv_scale": None}, "nothing falls back to 1"),
        ({"v_inv_scale": jnp.ones(3)}, "v_inv_scale to be one value or one per KV"),
        ({"implementation": "triton"}, "implementation to be None or one of"),
    ],
)
def test_disagreeing_arguments_are_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        append_rows(jnp.ones((2, 1, 8)), [0, 1], **change)


def test_other_pools_take_neither_scales_nor_statistics():
    pools = make_pages(NUM_PAGES, 1, PAGE_SIZE, 8, jnp.bfloat16)
    k = jnp.ones((2, 1, 8))
    with pytest.raises(ValueError, match="to be None for pools of bfloat16"):
        append_rows(k, [0, 1], pools=pools)
    with pytest.raises(ValueError, match="statistics=False for pools of bfloat16"):
        append_rows(k, [0, 1], pools=pools, inv_scale=None, statistics=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "rows", "message"),
    [
        ((64, 64), jnp.float32, jnp.bfloat16, "FP8 and BF16 pools, got float32"),
        ((64, 64), jnp.bfloat16, jnp.float32, "bfloat16 rows, got float32"),
        ((64, 80), jnp.bfloat16, jnp.bfloat16, "head_dim .* got 80"),
        ((32, 64), jnp.bfloat16, jnp.bfloat16, "page sizes .* got 32"),
    ],
)
def test_mosaic_says_what_it_does_not_serve(shape, dtype, rows, message):
    page_size, head_dim = shape
    pools = make_pages(2, 1, page_size, head_dim, dtype)
    k = jnp.ones((1, 1, head_dim), rows)
    plan = plan_append(jnp.zeros(1, jnp.int32), num_pages=2, page_size=page_size)
    with pytest.raises(NotImplementedError, match=message):
        kv_append(*pools, k, k, plan, implementation="mosaic_gpu")


def test_mosaic_says_of_how_many_tokens_it_takes_no_statistics():
    num_tokens = 3_000_000
    pool = jax.ShapeDtypeStruct((64, 2, 64, 64), FP8_DTYPE)
    rows = jax.ShapeDtypeStruct((num_tokens, 2, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    scale = jax.ShapeDtypeStruct((2,), jnp.float32)
    inputs = AppendInputs(pool, pool, rows, rows, slots, scale, scale)
    config = AppendConfig(**(_CONFIG | {"num_programs": 4}))
    append = functools.partial(
        run, mosaic_gpu.kv_append, statistics=True, config=config
    )
    with pytest.raises(NotImplementedError, match="at most 65535 values in one entry"):
        jax.eval_shape(append, inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads_per_program": 3}, "to be 1, 2 or 4"),
        ({"num_stages": 0}, "to be at least 1"),
        ({"num_programs": 0}, "to be at least 1"),
    ],
)
def test_a_wrong_config_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        AppendConfig(**(_CONFIG | change))


@pytest.mark.parametrize(("num_kv_heads", "want"), [(1, 1), (6, 2), (3, 1), (32, 4)])
def test_heads_per_program_divide_the_heads(num_kv_heads, want):
    geometry = PageGeometry(4, num_kv_heads, 128, 128)
    config = choose_config(8, geometry, FP8_DTYPE, statistics=False)
    assert config.heads_per_program == want


@pytest.mark.parametrize(
    ("num_tokens", "statistics", "want"),
    [(2048, False, False), (65536, False, True), (65536, True, False)],
)
def test_only_a_long_batch_has_a_program_for_each_page(num_tokens, statistics, want):
    geometry = PageGeometry(1024, 8, 128, 128)
    config = choose_config(num_tokens, geometry, FP8_DTYPE, statistics=statistics)
    assert config.whole_pages == want
    assert config.num_programs == (512 * 16 if want else 528)


# Mosaic


SMALL_TOKEN_CASES = {
    "fp8 statistics": small_case(statistics=True),
    "fp8 odd heads": small_case(num_kv_heads=3, head_dim=128, page_size=128),
    "fp8 head_dim 256": small_case(num_kv_heads=4, head_dim=256, num_tokens=3),
    "one head statistics": small_case(
        num_kv_heads=1, head_dim=256, num_tokens=3, statistics=True
    ),
    "bf16": small_case(dtype=jnp.bfloat16),
    "bf16 padding": small_case(dtype=jnp.bfloat16, slots="padding"),
}

SMALL_PAGE_CASES = {
    "fp8 mid page statistics": small_case(
        slots="mid_page", num_tokens=100, num_kv_heads=1, statistics=True
    ),
    "fp8 leftovers statistics": small_case(
        slots="mixed", num_tokens=70, num_kv_heads=1, statistics=True
    ),
    "fp8 ragged page 128": small_case(
        slots="ragged", num_tokens=200, page_size=128, num_kv_heads=1
    ),
    "fp8 head_dim 256": small_case(
        slots="mid_page", num_tokens=64, num_kv_heads=1, head_dim=256
    ),
    "bf16 page 128": small_case(
        slots="mid_page",
        num_tokens=260,
        page_size=128,
        num_kv_heads=1,
        dtype=jnp.bfloat16,
    ),
    "bf16 shared page": small_case(
        slots="shared_page", num_tokens=64, num_kv_heads=1, dtype=jnp.bfloat16
    ),
}


def assert_mosaic_equals_reference(case: AppendCase, **kwargs) -> None:
    inputs = make_inputs(case, 3)
    tiles = kwargs.pop("page_tiles", None)
    keywords = {"statistics": case.statistics, "page_tiles": tiles}
    expected = run(append_with_xla, inputs, **keywords)
    actual = run(append_with_mosaic, inputs, **keywords, **kwargs)
    assert_same_pools(actual, expected)
    assert_same_statistics(actual[2], expected[2])


def interpreted():
    return plgpu.InterpretGPUParams(detect_races=True)


@pytest.mark.parametrize("name", SMALL_TOKEN_CASES)
def test_interpreted_token_kernel_equals_the_reference(name):
    assert_mosaic_equals_reference(SMALL_TOKEN_CASES[name], interpret=interpreted())


@pytest.mark.parametrize(
    ("name", "num_stages", "whole_pages"),
    [
        ("fp8 mid page statistics", 2, False),
        ("fp8 leftovers statistics", 1, False),
        ("fp8 ragged page 128", 2, True),
        ("fp8 head_dim 256", 2, False),
        ("bf16 page 128", 1, True),
        ("bf16 page 128", 3, False),
        ("bf16 shared page", 2, False),
    ],
)
def test_interpreted_page_kernel_equals_the_reference(name, num_stages, whole_pages):
    # Few programs, so that rings turn and each has several tokens of what is left.
    case = SMALL_PAGE_CASES[name]
    config = AppendConfig(
        heads_per_program=1,
        num_stages=num_stages,
        num_programs=4 * case.num_kv_heads,
        whole_pages=whole_pages,
    )
    assert_mosaic_equals_reference(
        case, page_tiles=True, config=config, interpret=interpreted()
    )


def distinct_shapes(cases: list[AppendCase]) -> list[AppendCase]:
    """Keeps one of the cases that differ in their slots alone."""
    by_shape = {
        dataclasses.replace(case, name="", slots="decode"): case for case in cases
    }
    return list(by_shape.values())


@pytest.mark.parametrize("case", distinct_shapes(CASES), ids=lambda case: case.name)
def test_mosaic_lowers_for_an_h200(case):
    inputs = jax.eval_shape(lambda: make_inputs(case, 0))
    f = functools.partial(run, append_with_mosaic, statistics=case.statistics)
    text = lower_for_h200(f, inputs)
    assert ("kv_append_pages" in text) == (case.num_tokens > 256)
    assert ("kv_append_tokens" in text) == (case.num_tokens <= 256)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mosaic_equals_the_reference_on_the_gpu(case):
    assert_mosaic_equals_reference(case)


@pytest.mark.gpu
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_rows_before_the_first_and_past_the_last_token_are_never_used(num_stages):
    # The tile of a sequence that begins inside a page starts before the first row
    # of k, and the last one ends past it: the copy engine must fill with zeros.
    case = AppendCase(
        name="edges",
        num_pages=8,
        num_kv_heads=8,
        head_dim=128,
        page_size=128,
        num_tokens=128,
        slots="mid_page",
        statistics=True,
    )
    config = AppendConfig(heads_per_program=4, num_stages=num_stages, num_programs=48)
    assert_mosaic_equals_reference(case, page_tiles=True, config=config)


@pytest.mark.gpu
def test_the_best_implementation_on_the_gpu_copies_no_pool():
    inputs = make_inputs(small_case(num_tokens=300, num_pages=64), 0)
    compiled = compile_donated(inputs)
    assert "kv_append_pages" in compiled.as_text()
    assert not pool_copies(compiled, inputs)
