"""Argument shapes of real models and their edges, for tests and benchmarks."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8 import FP8_DTYPE

# Odd, so that the pages of an array that repeats what was drawn differ.
_MAX_DRAWN = (1 << 20) - 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call. Query starts are the default ones unless given."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]
    page_size: int = 128
    num_queries: int = 1
    pool_dtype: Any = FP8_DTYPE
    q_dtype: Any = jnp.bfloat16
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    query_starts: tuple[int, ...] | None = None
    scales_per_head: bool = False

    @property
    def fp8(self) -> bool:
        return self.pool_dtype == FP8_DTYPE

    @property
    def pages_per_seq(self) -> int:
        return max(1, -(-max(self.seq_lens) // self.page_size))

    @property
    def num_pages(self) -> int:
        """Each sequence has its own pages, and one is left over."""
        return 1 + sum(-(-n // self.page_size) for n in self.seq_lens)

    @property
    def options(self) -> dict[str, Any]:
        """The static keyword arguments of the op."""
        return {
            "sliding_window": self.sliding_window,
            "logit_soft_cap": self.logit_soft_cap,
        }


_LLAMA = Case(num_q_heads=32, num_kv_heads=8, head_dim=128, seq_lens=(8192,) * 32)


def _llama(**changes: Any) -> Case:
    return dataclasses.replace(_LLAMA, **changes)


# Around the edges of a page of 128 and of a pass of 1,024 tokens, and one sequence of
# more tiles than a launch has blocks.
_EDGES = (0, 1, 127, 128, 129, 1023, 1024, 1025, 2500, 40000)
_FEW = (300, 128, 1)

CASES: dict[str, Case] = {
    "llama-3.1-8b": _llama(),
    "llama-3.1-8b-per-head": _llama(scales_per_head=True, seq_lens=(2048,) * 8),
    "llama-3.1-8b-one-long": _llama(seq_lens=(32768,)),
    "llama-3.1-8b-edges": _llama(seq_lens=_EDGES),
    # A block takes a dozen splits, whose queries follow each other through two slots.
    "llama-3.1-8b-many-short": _llama(seq_lens=tuple(37 * i % 300 for i in range(400))),
    "llama-3.1-8b-page-64": _llama(page_size=64, seq_lens=(*_EDGES, 63, 64, 65)),
    "llama-3.1-8b-bf16": _llama(pool_dtype=jnp.bfloat16, seq_lens=(2048,) * 8),
    "llama-3.1-8b-bf16-edges": _llama(pool_dtype=jnp.bfloat16, seq_lens=_EDGES),
    "llama-3.1-8b-bf16-page-64": _llama(
        pool_dtype=jnp.bfloat16, page_size=64, seq_lens=_EDGES
    ),
    "llama-3.1-8b-float32-queries": _llama(q_dtype=jnp.float32, seq_lens=_EDGES),
    "llama-3.1-8b-2-queries": _llama(num_queries=2, seq_lens=_EDGES),
    "llama-3.1-8b-4-queries": _llama(num_queries=4, seq_lens=_EDGES),
    "llama-3.1-8b-8-queries": _llama(num_queries=8, seq_lens=_EDGES),
    "llama-3.1-8b-8-queries-bf16": _llama(
        num_queries=8, pool_dtype=jnp.bfloat16, seq_lens=_EDGES
    ),
    # The first query in the middle, padding before the start and past the end.
    "llama-3.1-8b-query-starts": _llama(
        num_queries=4,
        seq_lens=(300, 300, 300, 300, 2),
        query_starts=(128, 298, 300, -2, -1),
    ),
    "llama-3.1-8b-window": _llama(
        sliding_window=1024, num_queries=2, seq_lens=(*_EDGES, 8192)
    ),
    "smollm2": Case(num_q_heads=9, num_kv_heads=3, head_dim=64, seq_lens=_EDGES),
    "smollm2-page-64": Case(
        num_q_heads=9, num_kv_heads=3, head_dim=64, seq_lens=_EDGES, page_size=64
    ),
    "smollm2-bf16": Case(
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        seq_lens=_EDGES,
        pool_dtype=jnp.bfloat16,
    ),
    "qwen2.5-0.5b": Case(num_q_heads=14, num_kv_heads=2, head_dim=64, seq_lens=_EDGES),
    "qwen2.5-0.5b-8-queries": Case(
        num_q_heads=14, num_kv_heads=2, head_dim=64, seq_lens=_EDGES, num_queries=8
    ),
    "gemma-3": Case(
        num_q_heads=4, num_kv_heads=1, head_dim=256, seq_lens=_EDGES, sliding_window=512
    ),
    "gemma-3-global": Case(
        num_q_heads=4, num_kv_heads=1, head_dim=256, seq_lens=_EDGES
    ),
    "gemma-3-4-queries": Case(
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=256,
        seq_lens=_EDGES,
        num_queries=4,
        sliding_window=512,
    ),
    "gemma-3-page-64-bf16": Case(
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=256,
        seq_lens=_EDGES,
        page_size=64,
        pool_dtype=jnp.bfloat16,
    ),
    "gemma-2-soft-cap": Case(
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=256,
        seq_lens=_FEW,
        logit_soft_cap=50.0,
        sliding_window=4096,
    ),
    "group-1": Case(num_q_heads=8, num_kv_heads=8, head_dim=128, seq_lens=_EDGES),
    "group-16": Case(num_q_heads=32, num_kv_heads=2, head_dim=128, seq_lens=_EDGES),
    "group-16-4-queries": Case(
        num_q_heads=32, num_kv_heads=2, head_dim=128, seq_lens=_EDGES, num_queries=4
    ),
    "mqa": Case(num_q_heads=8, num_kv_heads=1, head_dim=128, seq_lens=_EDGES),
}


# From 17 to 65,536 tokens, evenly in their logarithm.
_RAGGED = tuple(int(17 * (65536 / 17) ** (i / 63)) for i in range(64))

# What a decode step spends its time on, by the length and number of sequences.
BENCHMARK_CASES: dict[str, Case] = {
    "32x8192": _llama(),
    "64x32768": _llama(seq_lens=(32768,) * 64),
    "ragged-64": _llama(seq_lens=_RAGGED),
    "1x131072": _llama(seq_lens=(131072,)),
    "8x2048": _llama(seq_lens=(2048,) * 8),
    "1x8192": _llama(seq_lens=(8192,)),
    "32x8192-group-1": _llama(num_q_heads=8),
    "32x8192-group-8": _llama(num_q_heads=64),
    "32x8192-group-16": _llama(num_q_heads=128),
    "32x8192-2-queries": _llama(num_queries=2),
    "32x8192-4-queries": _llama(num_queries=4),
    "32x8192-8-queries": _llama(num_queries=8),
    "32x8192-head-dim-64": _llama(head_dim=64),
    "32x8192-head-dim-256": _llama(head_dim=256),
    "32x8192-page-64": _llama(page_size=64),
    "32x8192-window-1024": _llama(sliding_window=1024),
    "32x8192-window-4096-cap": _llama(sliding_window=4096, logit_soft_cap=50.0),
    "32x8192-bf16": _llama(pool_dtype=jnp.bfloat16),
    "8x2048-bf16": _llama(pool_dtype=jnp.bfloat16, seq_lens=(2048,) * 8),
}


def make_inputs(case: Case, seed: int) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Builds the arguments of a call: pools of normal values, pages in random order.

    Returns:
      Positional arguments and keyword arguments of arrays. Entries of the block table
      past a sequence's end are garbage.
    """
    rng = np.random.default_rng(seed)
    pages = (case.num_pages, case.num_kv_heads)
    # Codes of this size use FP8 well; at a scale of 0.25 they stand for order 1.
    size = 4.0 if case.fp8 else 1.0
    k_pages = _normal(
        rng, (*pages, case.page_size, case.head_dim), size, case.pool_dtype
    )
    v_pages = _normal(
        rng, (*pages, case.head_dim, case.page_size), size, case.pool_dtype
    )
    q_shape = (len(case.seq_lens), case.num_queries, case.num_q_heads, case.head_dim)
    q = _normal(rng, q_shape, 1.0, case.q_dtype)
    block_table = _block_table(case, rng)
    seq_lens = jnp.asarray(case.seq_lens, jnp.int32)
    arrays: dict[str, Any] = {}
    if case.query_starts is not None:
        arrays["query_starts"] = jnp.asarray(case.query_starts, jnp.int32)
    if case.fp8:
        heads = case.num_kv_heads if case.scales_per_head else 1
        arrays["k_scale"] = jnp.linspace(0.25, 0.2, heads, dtype=jnp.float32)
        arrays["v_scale"] = jnp.linspace(0.3, 0.4, heads, dtype=jnp.float32)
    return (q, k_pages, v_pages, block_table, seq_lens), arrays


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], size: float, dtype: Any
) -> jax.Array:
    """Draws up to `_MAX_DRAWN` values; a larger array repeats them, on the device."""
    total = math.prod(shape)
    drawn = rng.standard_normal(min(total, _MAX_DRAWN), np.float32) * np.float32(size)
    drawn = jnp.asarray(drawn.astype(dtype))
    if total <= _MAX_DRAWN:
        return drawn.reshape(shape)
    return jnp.tile(drawn, -(-total // _MAX_DRAWN))[:total].reshape(shape)


def _block_table(case: Case, rng: np.random.Generator) -> jax.Array:
    pages = rng.permutation(case.num_pages)
    table = rng.choice([-1, case.num_pages, 2**30], (len(case.seq_lens), 1))
    table = np.repeat(table, case.pages_per_seq, axis=1)
    used = 0
    for seq, length in enumerate(case.seq_lens):
        count = -(-length // case.page_size)
        table[seq, :count] = pages[used : used + count]
        used += count
    return jnp.asarray(table, jnp.int32)
