"""Calls of paged attention on small cases, and how far a result may be off."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.config import TUNED, ShapeClass
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.pages.layout import write_slots

# Norm of the error over the norm of the output, for each query. Queries and weights
# keep 2^-4 of e4m3's rounding error of 2^-4: 2^-8 at most, 2^-9.8 rms, and so do the
# logits' errors, whose size is 1 here; BF16 weights have 2^-9. The output's rounding to
# BF16 adds 2^-9.8 rms. Together 2^-9 rms; a factor of 2 for the spread of few heads.
TOLERANCE = 2.0**-8

# Every branch of the kernels, small enough to interpret: two passes and online, FP8
# and BF16, each head_dim and page size, padding queries, windows, caps, float32.
SMALL = {
    "fp8": Case(num_q_heads=8, num_kv_heads=2, head_dim=64, seq_lens=(129, 0, 1)),
    "fp8-head-dim-128": Case(
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=128,
        seq_lens=(130, 64),
        page_size=64,
        scales_per_head=True,
    ),
    "fp8-head-dim-256": Case(
        num_q_heads=1, num_kv_heads=1, head_dim=256, seq_lens=(129, 3)
    ),
    "fp8-online-query-starts": Case(
        num_q_heads=6,
        num_kv_heads=1,
        head_dim=64,
        seq_lens=(100, 100, 2),
        num_queries=4,
        query_starts=(70, 98, -1),
        page_size=64,
    ),
    "fp8-window-soft-cap-float32-queries": Case(
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=64,
        seq_lens=(200, 290),
        num_queries=4,
        q_dtype=jnp.float32,
        sliding_window=40,
        logit_soft_cap=5.0,
    ),
    "bf16": Case(
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=64,
        seq_lens=(65, 3),
        num_queries=2,
        page_size=64,
        pool_dtype=jnp.bfloat16,
    ),
    "bf16-online": Case(
        num_q_heads=3,
        num_kv_heads=1,
        head_dim=128,
        seq_lens=(140,),
        num_queries=8,
        pool_dtype=jnp.bfloat16,
        sliding_window=10,
    ),
}


def attend(case: Case, args, arrays, **kwargs) -> np.ndarray:
    out = paged_attention(*args, **arrays, **case.options, **kwargs)
    return np.asarray(out, np.float32)


def spans(case: Case) -> list[tuple[int, int, int]]:
    """Each sequence's query start, and the first and past-the-last token it sees."""
    starts = case.query_starts or [n - case.num_queries for n in case.seq_lens]
    window = case.sliding_window or 1 << 30
    return [
        (start, max(0, start - window + 1), min(n, start + case.num_queries))
        for start, n in zip(starts, case.seq_lens, strict=True)
    ]


def poison_dead_slots(case: Case, args):
    """Fills all slots that no query sees with NaN."""
    q, k_pages, v_pages, table, seq_lens = args
    live = set()
    for row, (_, low, end) in zip(np.asarray(table), spans(case), strict=True):
        live.update(
            row[t // case.page_size] * case.page_size + t % case.page_size
            for t in range(low, end)
        )
    slots = sorted(set(range(case.num_pages * case.page_size)) - live)
    shape = (len(slots), case.num_kv_heads, case.head_dim)
    rows = jnp.full(shape, jnp.nan, jnp.float32).astype(case.pool_dtype)
    slots = jnp.asarray(slots, jnp.int32)
    return (q, *write_slots(k_pages, v_pages, rows, rows, slots), table, seq_lens)


def largest_error(got, want) -> float:
    """Largest error of a query relative to its output; padding must be exactly 0."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    norm = np.linalg.norm(want, axis=(2, 3))
    error = np.linalg.norm(got - want, axis=(2, 3))
    assert not error[norm == 0].any()
    return float(np.max(error[norm > 0] / norm[norm > 0]))


def permute_pages(case: Case, args):
    q, k_pages, v_pages, table, seq_lens = args
    order = np.random.default_rng(3).permutation(case.num_pages)
    moved_to = np.argsort(order)
    table = np.asarray(table)
    valid = (table >= 0) & (table < case.num_pages)
    table = np.where(valid, moved_to[np.clip(table, 0, case.num_pages - 1)], table)
    return (q, k_pages[order], v_pages[order], jnp.asarray(table, jnp.int32), seq_lens)


def problem_of(case: Case) -> Problem:
    (q, k_pages, _, table, _), _ = jax.eval_shape(lambda: make_inputs(case, 0))
    return Problem.of(q, k_pages, table, softmax_scale=1.0, **case.options)


TUNED_SHAPES = [(kind, shape) for kind, table in TUNED.items() for shape in table]


def case_of(shape: ShapeClass, seq_lens: tuple[int, ...]) -> Case:
    """A case of a tuned class."""
    num_queries = 2 if shape.several_queries else 1
    return Case(
        num_q_heads=2 * shape.num_columns // num_queries,
        num_kv_heads=2,
        head_dim=shape.head_dim,
        seq_lens=seq_lens,
        page_size=shape.page_size,
        num_queries=num_queries,
        pool_dtype=FP8_DTYPE if shape.fp8 else jnp.bfloat16,
    )
