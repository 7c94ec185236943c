"""Calls of paged attention on small cases, and how far a result may be off."""

import dataclasses
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import Case, make_inputs
from pallas_kernels.paged_attention.problem import Problem

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


_COMPILING = ThreadPoolExecutor()


@functools.cache
def _compiled(case: Case, implementation: Implementation) -> Future[Any]:
    args, arrays = jax.eval_shape(lambda: make_inputs(case, 0))
    options = {"implementation": implementation, **case.options}
    f = jax.jit(functools.partial(paged_attention, **options))
    return _COMPILING.submit(lambda: f.lower(*args, **arrays).compile())


def compile_side_by_side(request: pytest.FixtureRequest, cases: dict[str, Case]):
    """Compiles what the chosen tests of a class will call: each takes seconds."""
    chosen = [item for item in request.session.items if item.cls is request.cls]
    for name in {item.callspec.params["name"] for item in chosen}:
        _compiled(cases[name], "mosaic_gpu")
        _compiled(_wide(cases[name]), "xla")


def kernel_on_gpu(case: Case, args, arrays) -> np.ndarray:
    out = _compiled(case, "mosaic_gpu").result()(*args, **arrays)
    return np.asarray(out, np.float32)


def reference_on_gpu(case: Case, args, arrays) -> np.ndarray:
    """Computes in float32 from the same queries, and does not round the output."""
    q, *rest = args
    f = _compiled(_wide(case), "xla").result()
    return np.asarray(f(q.astype(jnp.float32), *rest, **arrays))


def check_on_gpu(case: Case) -> None:
    """Holds a kernel against the reference, and two runs against each other."""
    args, arrays = make_inputs(case, 0)
    args = poison_dead_slots(case, args)
    got = kernel_on_gpu(case, args, arrays)
    want = reference_on_gpu(case, args, arrays)
    assert np.isfinite(want).all()
    assert largest_error(got, want) < TOLERANCE
    np.testing.assert_array_equal(kernel_on_gpu(case, args, arrays), got)


def _wide(case: Case) -> Case:
    return dataclasses.replace(case, q_dtype=jnp.float32)


def spans(case: Case) -> list[tuple[int, int, int]]:
    """Each sequence's query start, and the first and past-the-last token it sees."""
    starts = case.query_starts or [n - case.num_queries for n in case.seq_lens]
    window = case.sliding_window or 1 << 30
    return [
        (start, max(0, start - window + 1), min(n, start + case.num_queries))
        for start, n in zip(starts, case.seq_lens, strict=True)
    ]


def poison_dead_slots(case: Case, args):
    """Fills slots that no query sees, and queries that are padding, with NaN."""
    q, k_pages, v_pages, table, seq_lens = args
    table, page_size = np.asarray(table), case.page_size
    live = np.zeros((case.num_pages, page_size), bool)
    real = np.zeros(q.shape[:2], bool)
    for seq, (start, low, end) in enumerate(spans(case)):
        position = start + np.arange(case.num_queries)
        real[seq] = (position >= 0) & (position < case.seq_lens[seq])
        t = np.arange(low, max(low, end))
        live[table[seq, t // page_size], t % page_size] = True
    nan = jnp.asarray(jnp.nan, case.pool_dtype)
    k_pages = jnp.where(live[:, None, :, None], k_pages, nan)
    v_pages = jnp.where(live[:, None, None, :], v_pages, nan)
    q = jnp.where(real[:, :, None, None], q, jnp.nan)
    return (q, k_pages, v_pages, table, seq_lens)


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
