"""Bytes of a cache, counted by hand."""

import numpy as np

from fp8kv_jax.cache import CacheConfig, init_cache
from fp8kv_jax.drift.capacity import count_capacity

CONFIG = CacheConfig(
    num_layers=3, num_kv_heads=2, head_dim=8, num_pages=1, page_size=16
)


def lengths(*sizes):
    return np.bincount(sizes, minlength=64)


def test_pages_ends_scales_and_tables_are_counted_to_the_byte():
    capacity = count_capacity(CONFIG, lengths(1, 16, 17), groups=2)
    # Pages: 1 + 1 + 2; a token has 2 x 2 x 8 values in each of 3 layers.
    assert (capacity.num_pages, capacity.num_tokens) == (4, 34)
    assert capacity.fp8.bytes_per_token == 96
    assert capacity.fp8.pages == 4 * 16 * 96
    assert capacity.fp8.page_end_waste == (64 - 34) * 96
    assert capacity.fp8.scales == 3 * 2 * 16
    assert capacity.fp8.block_tables == 16
    assert capacity.fp8.longest_sequence == 2 * 16 * 96 + 8
    assert capacity.bf16.pages == 2 * capacity.fp8.pages
    assert capacity.bf16.scales == 0
    total = capacity.fp8.pages + 96 + 16
    assert capacity.saved_share == 1 - total / (capacity.bf16.pages + 16)


def test_the_bytes_are_those_of_real_pools():
    capacity = count_capacity(CONFIG, lengths(5), groups=1)
    assert capacity.fp8.pages == init_cache(CONFIG).nbytes


def test_layers_kept_wide_count_as_bf16_whatever_they_held():
    config = CacheConfig(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        num_pages=1,
        page_size=16,
        high_precision_layers=(1,),
        high_precision_dtype="float32",
    )
    capacity = count_capacity(config, lengths(16), groups=1)
    assert capacity.fp8.bytes_per_token == 32 + 64 + 32
    assert capacity.fp8.scales == 2 * 16
