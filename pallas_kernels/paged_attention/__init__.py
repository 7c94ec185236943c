"""Attention of new queries over a paged KV cache."""

from pallas_kernels.paged_attention.op import paged_attention as paged_attention
