"""What each block takes, and the tuning of the split kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import lower_for_h200
from paged_attention_calls import SMALL, problem_of, spans

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import (
    BENCHMARK_CASES,
    CASES,
    Case,
    make_inputs,
)
from pallas_kernels.paged_attention.config import (
    NUM_MULTIPROCESSORS,
    SHARED_MEMORY_PER_BLOCK,
    TUNED,
    Config,
    ShapeClass,
    config_of,
    heuristic_config,
    pick_config,
)
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.schedule import for_each_item, share_of, span_of


def make_config(**changes: int) -> Config:
    fields = {"pages_per_tile": 1, "tiles_per_pass": 1, "num_stages": 2}
    return Config(**fields | {"num_blocks": 1} | changes)


TUNED_SHAPES = [(kind, shape) for kind, table in TUNED.items() for shape in table]

_TWO_HEADS = Case(num_q_heads=8, num_kv_heads=2, head_dim=128, seq_lens=(1,))
_MIXED = (0, 1, 128, 0, 129, 5000, 17, 0, 900, 2049)
# Two blocks of a multiprocessor over many lengths, one length, and few tiles; then
# lengths of 0 among others, nothing at all, and a window that begins inside a page.
SHARED = {
    "ragged-64": (BENCHMARK_CASES["ragged-64"], 264),
    "32x8192": (BENCHMARK_CASES["32x8192"], 264),
    "8x2048": (BENCHMARK_CASES["8x2048"], 264),
    # Some of these shares begin between two heads.
    "mixed": (dataclasses.replace(_TWO_HEADS, seq_lens=_MIXED), 16),
    "nothing": (dataclasses.replace(_TWO_HEADS, seq_lens=(0,) * 3), 2),
    "window": (
        dataclasses.replace(
            _TWO_HEADS, seq_lens=_MIXED, sliding_window=700, num_queries=3
        ),
        5,
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_blocks_take_every_tile_once_and_equal_work(name):
    case, num_blocks = SHARED[name]
    problem, config = problem_of(case), make_config(num_blocks=num_blocks)
    seq_lens = jnp.asarray(case.seq_lens, jnp.int32)
    get_span = functools.partial(span_of, problem, seq_lens, None)
    heads, tiles = problem.num_seqs * problem.num_kv_heads, problem.pages_per_seq
    # Sums of random numbers: one tile missed and another taken twice do not cancel.
    keys = np.random.default_rng(0).integers(0, 1 << 16, (heads, tiles), np.int32)
    key_sums = jnp.asarray(np.pad(keys.cumsum(axis=1), ((0, 0), (1, 0))), jnp.int32)

    def add(count, item, sums):
        first = (item.first - item.span.first) // problem.page_size
        row = key_sums[item.seq * problem.num_kv_heads + item.head]
        key = row[first + item.num_tiles] - row[first]
        ends = (item.is_first.astype(int), item.is_last.astype(int))
        return sums + jnp.stack([item.num_tiles, *ends, key])

    def work(block):
        share = share_of(problem, config, get_span, block)
        zeros = jnp.zeros((4,), jnp.int32)
        return for_each_item(problem, config, get_span, block, share, add, zeros)

    blocks = jnp.arange(config.num_blocks, dtype=jnp.int32)
    splits, sums = (np.asarray(x) for x in jax.jit(jax.vmap(work))(blocks))
    seen = [max(0, end - low // 128 * 128) for _, low, end in spans(case)]
    want = np.repeat([-(-n // 128) for n in seen], problem.num_kv_heads)
    live = keys * (np.arange(tiles)[None, :] < want[:, None])
    starts = ends = (want > 0).sum()
    want_sums = [want.sum(), starts, ends, live.sum(dtype=np.int32)]
    np.testing.assert_array_equal(sums.sum(axis=0, dtype=np.int32), want_sums)
    # A split more, at each end of a block's share, than its work was measured by.
    cost = sums[:, 0] + 2 * splits
    assert cost.max() <= cost.sum() / config.num_blocks + 4


class TestConfig:
    @pytest.mark.parametrize("name", [*CASES, *SMALL])
    def test_the_heuristic_fits_shared_memory(self, name):
        problem = problem_of((CASES | SMALL)[name])
        config = heuristic_config(problem)
        assert config.shared_memory(problem) <= SHARED_MEMORY_PER_BLOCK
        assert config.max_splits(problem) >= 1

    @pytest.mark.parametrize(("kind", "shape"), TUNED_SHAPES)
    def test_a_case_picks_each_tuned_config_which_fits_and_lowers(self, kind, shape):
        """What is tuned is one of the cases, which run on a GPU."""
        tuning = TUNED[kind][shape]
        cases = [c for c in CASES.values() if ShapeClass.of(problem_of(c)) == shape]
        case = max(cases, key=lambda case: problem_of(case).max_tokens)
        problem = problem_of(case)
        blocks = tuning.blocks_per_multiprocessor
        config = pick_config(problem, kind)
        assert config == config_of(problem, tuning)
        assert config.fits(problem, blocks)
        assert config.num_blocks == NUM_MULTIPROCESSORS * blocks
        args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
        f = functools.partial(paged_attention, implementation="mosaic_gpu")
        assert "paged_attention_splits" in lower_for_h200(f, *args, **arrays)

    def test_shapes_outside_the_table_take_the_heuristic(self):
        problem = problem_of(CASES["llama-3.1-8b"])
        assert pick_config(problem, "NVIDIA B200") == heuristic_config(problem)
        assert pick_config(problem, "NVIDIA H200") != heuristic_config(problem)

    def test_several_queries_have_tuning_of_their_own_or_that_of_one(self):
        case = BENCHMARK_CASES["32x8192-group-16"]
        one = pick_config(problem_of(case), "NVIDIA H200")
        case = BENCHMARK_CASES["32x8192-4-queries"]
        assert pick_config(problem_of(case), "NVIDIA H200") != one
        case = BENCHMARK_CASES["32x8192"]
        one = pick_config(problem_of(case), "NVIDIA H200")
        case = dataclasses.replace(case, num_queries=2)
        assert pick_config(problem_of(case), "NVIDIA H200") == one

    def test_a_config_beyond_shared_memory_is_refused(self):
        args, arrays = make_inputs(SMALL["fp8"], 0)
        config = make_config(num_stages=40)
        options = dict(SMALL["fp8"].options, query_starts=None, softmax_scale=1.0)
        with pytest.raises(NotImplementedError, match="bytes of shared memory here"):
            paged_attention_mosaic_gpu(*args, **arrays, **options, config=config)

    def test_sizes_below_one_are_refused(self):
        with pytest.raises(ValueError, match="Expected num_stages >= 1, got 0"):
            make_config(num_stages=0)
