"""Chunks of prefill in the shapes of real models and at their edges."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.paged_attention.cases import Case

# Whole chunks with and without a prefix, one that starts inside a page, ones with
# padding before the first token (the default start is negative), no token at all.
_CHUNKS = (512, 2560, 1000, 300, 1, 0)
_CHUNK = Case(
    num_q_heads=32, num_kv_heads=8, head_dim=128, seq_lens=_CHUNKS, num_queries=512
)


def _chunk(**changes: Any) -> Case:
    return dataclasses.replace(_CHUNK, **changes)


PREFILL_CASES: dict[str, Case] = {
    "llama-3.1-8b": _chunk(),
    "llama-3.1-8b-page-64": _chunk(page_size=64),
    "llama-3.1-8b-per-head": _chunk(scales_per_head=True),
    "llama-3.1-8b-bf16": _chunk(pool_dtype=jnp.bfloat16),
    "llama-3.1-8b-float32-queries": _chunk(q_dtype=jnp.float32),
    "llama-3.1-8b-17-queries": _chunk(num_queries=17),
    "llama-3.1-8b-17-queries-long": _chunk(num_queries=17, seq_lens=(20001,)),
    "llama-3.1-8b-long": _chunk(num_queries=100, seq_lens=(16384, 20001)),
    # Chunks padded at their end: 300 of 512 queries, 1, none.
    "llama-3.1-8b-query-starts": _chunk(
        seq_lens=(1300, 129, 1000, 0), query_starts=(1000, 128, 1000, 0)
    ),
    "llama-3.1-8b-window": _chunk(sliding_window=200),
    "llama-3.1-8b-long-window": _chunk(sliding_window=1000, seq_lens=(5000, 700)),
    "smollm2": _chunk(num_q_heads=9, num_kv_heads=3, head_dim=64),
    "smollm2-bf16-page-64": _chunk(
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_size=64,
        pool_dtype=jnp.bfloat16,
    ),
    "qwen2.5-0.5b": _chunk(num_q_heads=14, num_kv_heads=2, head_dim=64),
    "gemma-3": _chunk(num_q_heads=4, num_kv_heads=1, head_dim=256, sliding_window=512),
    "gemma-3-bf16-page-64": _chunk(
        num_q_heads=4,
        num_kv_heads=1,
        head_dim=256,
        page_size=64,
        pool_dtype=jnp.bfloat16,
    ),
    "gemma-2-soft-cap": _chunk(
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=256,
        logit_soft_cap=50.0,
        sliding_window=4096,
    ),
    "group-1": _chunk(num_q_heads=8),
    "group-16": _chunk(num_q_heads=32, num_kv_heads=2),
}


def _prefix(num_tokens: int, **changes: Any) -> Case:
    return _chunk(num_queries=2048, seq_lens=(num_tokens + 2048,), **changes)


# 2,048 new tokens of Llama-3.1-8B, by the cached tokens before them.
PREFILL_BENCHMARK_CASES: dict[str, Case] = {
    "2048+0": _prefix(0),
    "2048+8192": _prefix(8192),
    "2048+32768": _prefix(32768),
    "2048+8192-bf16": _prefix(8192, pool_dtype=jnp.bfloat16),
    "2048+8192-page-64": _prefix(8192, page_size=64),
}
