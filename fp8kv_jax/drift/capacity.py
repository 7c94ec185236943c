"""What a cache takes for a workload, to the byte: in FP8 and in BF16."""

from dataclasses import replace

import numpy as np
from jaxtyping import Int64

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.drift.result_loss import CacheBytes, Capacity

# A float32 scale and its reciprocal, for keys and for values.
_BYTES_PER_GROUP = 2 * 2 * 4
_BYTES_PER_TABLE_ENTRY = 4


def count_capacity(
    cache: CacheConfig, lengths: Int64[np.ndarray, "max_tokens+1"], *, groups: int
) -> Capacity:
    """Counts the bytes of a workload's sequences, each with pages of its own.

    Layers in high precision count as BF16, whatever they held in this run.

    Args:
      cache: the FP8 cache.
      lengths: how many sequences have 0, 1, ... tokens.
      groups: scales of a layer's keys: 1, or one for each KV head.
    """
    fp8 = replace(cache, high_precision_dtype="bf16")
    bf16 = replace(fp8, dtype="bf16")
    size = np.arange(len(lengths), dtype=np.int64)
    pages = -(-size // cache.page_size)
    num_pages, num_tokens = int(lengths @ pages), int(lengths @ size)
    longest = int(pages[np.flatnonzero(lengths)[-1]])

    def count(config: CacheConfig) -> CacheBytes:
        per_token = config.bytes_per_token
        per_page = cache.page_size * per_token
        return CacheBytes(
            pages=num_pages * per_page,
            page_end_waste=(num_pages * cache.page_size - num_tokens) * per_token,
            scales=len(config.fp8_layers) * groups * _BYTES_PER_GROUP,
            block_tables=num_pages * _BYTES_PER_TABLE_ENTRY,
            bytes_per_token=per_token,
            longest_sequence=longest * (per_page + _BYTES_PER_TABLE_ENTRY),
        )

    narrow, wide = count(fp8), count(bf16)
    return Capacity(
        page_size=cache.page_size,
        num_sequences=int(lengths.sum()),
        num_tokens=num_tokens,
        num_pages=num_pages,
        fp8=narrow,
        bf16=wide,
        saved_share=1 - narrow.total / wide.total,
    )
