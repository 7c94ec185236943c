"""Chunked prefill: its kernels against the reference, interpreted and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_attention_calls import (
    attend,
    check_on_gpu,
    compile_side_by_side,
    largest_error,
    poison_dead_slots,
    problem_of,
)

from pallas_kernels.paged_attention import (
    paged_attention,
    prefill_mosaic_gpu,
    prefill_schedule,
)
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.config import SHARED_MEMORY_PER_BLOCK
from pallas_kernels.paged_attention.prefill_cases import PREFILL_CASES
from pallas_kernels.paged_attention.prefill_config import (
    PrefillConfig,
    heuristic_config,
)
from pallas_kernels.paged_attention.prefill_schedule import LastRound, last_round
from pallas_kernels.paged_attention.problem import Problem

# Norm of the error over the norm of the output, for each query. A rounding to BF16
# is 2^-9.2 rms. Of weights (BF16 pools), queries (float32) and output (BF16) two are
# rounded at once at most, and logits are of size 1: 2^-8.7 rms, and a factor of 1.6
# for the spread of few heads. FP8 pools round the weights to float16: 2^-12.2 rms.
TOLERANCE = 2.0**-8

_BLOCKS = {"num_blocks": 1, "gather_blocks": 1}
_SMALL = Case(
    num_q_heads=2, num_kv_heads=1, head_dim=64, seq_lens=(150,), num_queries=17
)


def _small(**changes) -> Case:
    return dataclasses.replace(_SMALL, **changes)


# Every branch of the kernels, small enough to interpret.
SMALL = {
    "prefix": _small(num_queries=70, seq_lens=(300,)),
    "edges": _small(seq_lens=(128, 129, 1, 0)),
    "odd-group-page-64": _small(num_q_heads=3, num_queries=130, page_size=64),
    "per-head": _small(num_q_heads=4, num_kv_heads=2, scales_per_head=True),
    "query-starts": _small(
        seq_lens=(100, 100, 100, 2), query_starts=(90, 20, 100, -1), page_size=64
    ),
    "window": _small(num_queries=70, sliding_window=50, seq_lens=(300,)),
    "window-within-a-tile-soft-cap": _small(sliding_window=9, logit_soft_cap=5.0),
    "bf16": _small(pool_dtype=jnp.bfloat16, head_dim=128),
    "head-dim-256": _small(head_dim=256),
}
# No more items than half of the blocks: with the blocks, and the plan.
CUT = {
    # Those of the second sequence are too short to be cut.
    "two-of-four-items": (
        _small(num_queries=70, seq_lens=(150, 20)),
        8,
        LastRound(first=0, num_items=4, parts=2),
    ),
    "after-a-whole-round": (
        _small(
            num_queries=70,
            num_q_heads=6,
            num_kv_heads=3,
            seq_lens=(200,),
            q_dtype=jnp.float32,
            pool_dtype=jnp.bfloat16,
        ),
        4,
        LastRound(first=4, num_items=2, parts=2),
    ),
}


def interpreted(case: Case, args, arrays, **sizes) -> jax.Array:
    """Runs the kernels in the interpreter, which knows no operands in registers."""
    q, k_pages, _, table, _ = args
    softmax_scale = case.head_dim**-0.5
    problem = Problem.of(q, k_pages, table, softmax_scale=softmax_scale, **case.options)
    # Few blocks, so that some take several items.
    config = PrefillConfig(
        block_kv=sizes.get("block_kv", heuristic_config(problem).block_kv),
        num_blocks=sizes.get("num_blocks", 2),
        gather_blocks=3,
        weights_in_registers=False,
    )
    return prefill_mosaic_gpu.prefill_mosaic_gpu(
        problem,
        *args,
        **(dict.fromkeys(("query_starts", "k_scale", "v_scale")) | arrays),
        config=config,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )


def reference(case: Case, args, arrays) -> np.ndarray:
    q, *rest = args
    args = (q.astype(jnp.float32), *rest)
    return attend(case, args, arrays, implementation="xla")


# Products with dead slots, which hold NaN here.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
class TestInterpreted:
    @pytest.mark.parametrize("name", SMALL)
    def test_equals_the_reference_whatever_dead_slots_hold(self, name):
        case = SMALL[name]
        args, arrays = make_inputs(case, 0)
        args = poison_dead_slots(case, args)
        want = reference(case, args, arrays)
        assert np.isfinite(want).all()
        assert largest_error(interpreted(case, args, arrays), want) < TOLERANCE

    @pytest.mark.parametrize("name", CUT)
    def test_few_items_are_cut_into_parts_and_merged(self, name, monkeypatch):
        monkeypatch.setattr(prefill_schedule, "_MIN_TILES_PER_PART", 1)
        case, num_blocks, want_plan = CUT[name]
        config = PrefillConfig(block_kv=64, num_blocks=num_blocks, gather_blocks=1)
        assert last_round(problem_of(case), config) == want_plan
        args, arrays = make_inputs(case, 0)
        args = poison_dead_slots(case, args)
        got = interpreted(case, args, arrays, block_kv=64, num_blocks=num_blocks)
        assert largest_error(got, reference(case, args, arrays)) < TOLERANCE

    def test_fp8_pools_lose_less_than_bf16_would(self):
        case = _small(q_dtype=jnp.float32)
        (q, *rest), arrays = make_inputs(case, 0)
        args = (q.astype(jnp.bfloat16).astype(jnp.float32), *rest)
        got = interpreted(case, args, arrays)
        # Neither queries nor output are rounded: weights to float16 alone.
        assert largest_error(got, reference(case, args, arrays)) < 2.0**-11

    def test_the_tolerance_bites(self):
        """Zeros, swapped pools and a scale off by 2 all exceed it."""
        case = _small(head_dim=128)
        (q, k_pages, v_pages, *rest), arrays = make_inputs(case, 0)
        got = np.asarray(interpreted(case, (q, k_pages, v_pages, *rest), arrays))
        swapped = reference(case, (q, v_pages, k_pages, *rest), arrays)
        wrong = [np.ones_like(swapped), swapped]
        for name in ("k_scale", "v_scale"):
            scales = {**arrays, name: 2 * arrays[name]}
            wrong.append(reference(case, (q, k_pages, v_pages, *rest), scales))
        for want in wrong:
            assert largest_error(got, want) > 10 * TOLERANCE
        assert largest_error(np.zeros_like(swapped), swapped) > 10 * TOLERANCE

    def test_nan_in_a_live_row_reaches_its_own_sequence_alone(self):
        case = _small(seq_lens=(30, 20, 130))
        args, arrays = make_inputs(case, 0)
        clean = np.asarray(interpreted(case, args, arrays), np.float32)
        q, k_pages, v_pages, table, seq_lens = args
        nan = case.pool_dtype(jnp.nan)
        k_pages = k_pages.at[int(table[0, 0])].set(nan)
        v_pages = v_pages.at[int(table[1, 0])].set(nan)
        args = (q, k_pages, v_pages, table, seq_lens)
        got = np.asarray(interpreted(case, args, arrays), np.float32)
        assert np.isnan(got[:2]).all()
        np.testing.assert_array_equal(got[2], clean[2])

    def test_sequences_one_by_one_change_nothing(self, monkeypatch):
        case = _small(seq_lens=(130, 0))
        args, arrays = make_inputs(case, 0)
        want = interpreted(case, args, arrays)
        monkeypatch.setattr(prefill_mosaic_gpu, "_MAX_GATHERED_BYTES", 1)
        got = interpreted(case, args, arrays)
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, want)))


class TestLowering:
    @pytest.mark.parametrize("name", PREFILL_CASES)
    def test_lowers_for_an_h200(self, name):
        case = PREFILL_CASES[name]
        args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
        f = functools.partial(
            paged_attention, implementation="mosaic_gpu", **case.options
        )
        text = lower_for_h200(f, *args, **arrays)
        assert "paged_prefill" in text
        assert "paged_attention_splits" not in text

    def test_an_h200_takes_the_kernels_by_itself(self):
        case = PREFILL_CASES["smollm2"]
        args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
        assert "paged_prefill" in lower_for_h200(paged_attention, *args, **arrays)

    def test_gathers_no_more_of_a_long_sequence_than_its_window(self):
        case = PREFILL_CASES["llama-3.1-8b-long-window"]
        (q, k_pages, _, table, _), _ = jax.eval_shape(lambda: make_inputs(case, 0))
        problem = Problem.of(q, k_pages, table, softmax_scale=1.0, **case.options)
        # 1,000 + 511 tokens are 12 tiles, if they do not begin with one.
        assert PrefillConfig(block_kv=128, **_BLOCKS).max_tiles(problem) == 13


class TestLastRound:
    def test_few_items_are_cut_into_many_parts(self):
        plan = self.plan(PREFILL_CASES["llama-3.1-8b-17-queries-long"])
        # 16 items for 132 blocks.
        assert plan == LastRound(first=0, num_items=16, parts=8)

    @pytest.mark.parametrize(
        "changes",
        [
            # 528 items, four for each block.
            {"num_queries": 2112, "seq_lens": (34816,)},
            # Three for each block, and 116 more: no two blocks for each of these.
            {"num_queries": 2048, "seq_lens": (34816,)},
            # Too few tiles.
            {"num_queries": 64, "seq_lens": (1024,)},
            {"num_queries": 64, "seq_lens": (34816,), "sliding_window": 1000},
        ],
    )
    def test_others_stay_whole(self, changes):
        case = dataclasses.replace(PREFILL_CASES["llama-3.1-8b"], **changes)
        assert self.plan(case) is None

    @staticmethod
    def plan(case: Case) -> LastRound | None:
        problem = problem_of(case)
        return last_round(problem, heuristic_config(problem))


class TestConfig:
    @pytest.mark.parametrize("name", PREFILL_CASES)
    def test_the_heuristic_fits_shared_memory(self, name):
        case = PREFILL_CASES[name]
        (q, k_pages, _, table, _), _ = jax.eval_shape(lambda: make_inputs(case, 0))
        problem = Problem.of(q, k_pages, table, softmax_scale=1.0, **case.options)
        config = heuristic_config(problem)
        assert config.shared_memory(problem) <= SHARED_MEMORY_PER_BLOCK

    def test_a_config_beyond_shared_memory_is_refused(self):
        args, arrays = make_inputs(SMALL["prefix"], 0)
        problem = Problem.of(
            args[0], args[1], args[3], softmax_scale=1.0, **SMALL["prefix"].options
        )
        config = PrefillConfig(block_kv=128, num_stages=9, **_BLOCKS)
        with pytest.raises(NotImplementedError, match="shared memory for prefill here"):
            prefill_mosaic_gpu.prefill_mosaic_gpu(
                problem, *args, **arrays, query_starts=None, config=config
            )

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"block_kv": 96}, "Expected block_kv to be 64 or 128, got 96"),
            ({"num_blocks": 0}, "Expected num_blocks >= 1, got 0"),
            ({"gather_blocks": 0}, "Expected gather_blocks >= 1, got 0"),
            ({"num_stages": 1}, "Expected num_stages >= 2, got 1"),
        ],
    )
    def test_other_sizes_are_refused(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            PrefillConfig(**({"block_kv": 64, **_BLOCKS} | sizes))


@pytest.fixture(scope="class")
def compiled(request):
    compile_side_by_side(request, PREFILL_CASES)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
class TestOnHopper:
    @pytest.mark.parametrize("name", PREFILL_CASES)
    def test_equals_the_reference_twice_alike_whatever_dead_slots_hold(self, name):
        check_on_gpu(PREFILL_CASES[name])
