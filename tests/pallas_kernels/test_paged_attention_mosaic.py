"""The Mosaic GPU kernels of decode against the reference: interpreted, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_attention_calls import (
    SMALL,
    TOLERANCE,
    attend,
    check_on_gpu,
    compile_side_by_side,
    kernel_on_gpu,
    largest_error,
    permute_pages,
    poison_dead_slots,
    problem_of,
)

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import CASES, make_inputs
from pallas_kernels.paged_attention.config import heuristic_config
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu

# Kernels that differ in kind; those of the tuning table are lowered by its own tests.
LOWERED = (
    "llama-3.1-8b-per-head",
    "llama-3.1-8b-float32-queries",
    "llama-3.1-8b-query-starts",
    "llama-3.1-8b-window",
    "llama-3.1-8b-8-queries-bf16",
    "qwen2.5-0.5b-8-queries",
    "gemma-2-soft-cap",
    "gemma-3-page-64-bf16",
)


class TestMosaic:
    @pytest.mark.parametrize("name", SMALL)
    def test_interpreted_equals_the_reference_whatever_dead_slots_hold(self, name):
        case = SMALL[name]
        args, arrays = make_inputs(case, 0)
        args = poison_dead_slots(case, args)
        options = {"softmax_scale": case.head_dim**-0.5, **case.options}
        scales = dict.fromkeys(("query_starts", "k_scale", "v_scale")) | arrays
        # Few blocks, so that some take several items.
        config = heuristic_config(problem_of(case))
        config = dataclasses.replace(config, num_blocks=min(2, config.num_blocks))
        # The detector takes a union of two rings, of K and of V, for one buffer.
        union = case.fp8 and min(case.head_dim, 128) != case.page_size
        got = paged_attention_mosaic_gpu(
            *args,
            **scales,
            **options,
            config=config,
            interpret=plgpu.InterpretGPUParams(detect_races=not union),
        )
        want = attend(case, args, arrays, implementation="xla")
        assert np.isfinite(want).all()
        assert largest_error(got, want) < TOLERANCE

    @pytest.mark.parametrize("name", LOWERED)
    def test_lowers_for_an_h200(self, name):
        case = CASES[name]
        args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
        f = functools.partial(
            paged_attention, implementation="mosaic_gpu", **case.options
        )
        text = lower_for_h200(f, *args, **arrays)
        assert "paged_attention_splits" in text
        assert "paged_attention_merge" in text

    @pytest.mark.parametrize(
        ("num_queries", "kernel"),
        [(1, "paged_attention_splits"), (128, "paged_prefill")],
    )
    def test_an_h200_takes_kernels_for_decode_and_for_prefill(
        self, num_queries, kernel
    ):
        case = dataclasses.replace(CASES["smollm2"], num_queries=num_queries)
        args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
        assert kernel in lower_for_h200(paged_attention, *args, **arrays)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"pool_dtype": jnp.float32}, "FP8 and BF16 pools, not float32"),
            ({"page_size": 16}, "page sizes .64, 128., not 16"),
            ({"head_dim": 32}, "head_dims .64, 128, 256., not 32"),
        ],
    )
    def test_says_why_it_does_not_serve_a_call(self, changes, reason):
        case = dataclasses.replace(SMALL["fp8"], **{"seq_lens": (4,), **changes})
        args, arrays = make_inputs(case, 0)
        with pytest.raises(NotImplementedError, match=reason):
            attend(case, args, arrays, implementation="mosaic_gpu")

    def test_does_not_serve_an_empty_call(self):
        case = SMALL["fp8"]
        (q, *pools, table, seq_lens), arrays = make_inputs(case, 0)
        args = (q[:0], *pools, table[:0], seq_lens[:0])
        with pytest.raises(NotImplementedError, match="no empty arrays"):
            attend(case, args, arrays, implementation="mosaic_gpu")


@pytest.fixture(scope="class")
def compiled(request):
    compile_side_by_side(request, CASES)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
class TestOnHopper:
    @pytest.mark.parametrize("name", CASES)
    def test_equals_the_reference_twice_alike_whatever_dead_slots_hold(self, name):
        check_on_gpu(CASES[name])

    @pytest.mark.parametrize("name", ["smollm2", "smollm2-bf16"])
    def test_permuting_pages_with_their_table_changes_nothing(self, name):
        case = CASES[name]
        args, arrays = make_inputs(case, 0)
        want = kernel_on_gpu(case, args, arrays)
        got = kernel_on_gpu(case, permute_pages(case, args), arrays)
        np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("pool", [1, 2])
    @pytest.mark.parametrize("name", ["smollm2", "smollm2-bf16"])
    def test_nan_in_a_live_row_reaches_its_own_sequence_alone(self, name, pool):
        case = CASES[name]
        args, arrays = make_inputs(case, 0)
        clean = kernel_on_gpu(case, args, arrays)
        args, longest = list(args), len(case.seq_lens) - 1
        nan = case.pool_dtype(jnp.nan)
        args[pool] = args[pool].at[int(args[3][longest, 0])].set(nan)
        got = kernel_on_gpu(case, args, arrays)
        assert np.isnan(got[longest]).all()
        np.testing.assert_array_equal(got[:longest], clean[:longest])
