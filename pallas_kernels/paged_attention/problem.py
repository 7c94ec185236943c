"""The static facts of one call that its kernels and their tuning share."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import FP8_DTYPE

# A wgmma takes columns by eight.
_COLUMN_ALIGNMENT = 8
_MAX_SWIZZLE_BYTES = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Sizes, dtypes and options of a call.

    All queries of a sequence that share a KV head form the `num_rows` rows of one
    product. The products are transposed, so these rows are its columns.
    """

    num_seqs: int
    num_queries: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    page_size: int
    num_pages: int
    pages_per_seq: int
    pool_dtype: jnp.dtype
    q_dtype: jnp.dtype
    softmax_scale: float
    sliding_window: int | None
    logit_soft_cap: float | None

    @property
    def fp8(self) -> bool:
        return self.pool_dtype == FP8_DTYPE

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.pool_dtype).itemsize

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table can hold."""
        return self.pages_per_seq * self.page_size

    @property
    def num_rows(self) -> int:
        return self.num_queries * self.group_size

    @property
    def num_columns(self) -> int:
        """Rows padded to what a product takes."""
        return -(-self.num_rows // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT

    @property
    def operand_rows(self) -> int:
        """Rows of an operand in shared memory: FP8 has a high and a low part of each."""
        return self.num_columns * (2 if self.fp8 else 1)

    @property
    def k_chunk(self) -> int:
        """Elements of a row of shared memory of K: of one token."""
        return min(_MAX_SWIZZLE_BYTES // self.itemsize, self.head_dim)

    @property
    def v_chunk(self) -> int:
        """Elements of a row of shared memory of V: tokens of one page."""
        return min(_MAX_SWIZZLE_BYTES // self.itemsize, self.page_size)

    def tile_shape(self, chunk: int, tokens: int) -> tuple[int, int]:
        """Tokens of one head in shared memory: chunks of columns below each other."""
        return tokens * self.head_dim // chunk, chunk

    def copies_per_tile(self, pages: int) -> int:
        """Copies that fill a tile; equal for K and V, whose barriers they share."""
        k_copies = self.head_dim // self.k_chunk
        v_copies = self.page_size // self.v_chunk
        return pages * max(k_copies, v_copies)

    @property
    def max_tokens(self) -> int:
        """Bound on the tokens a sequence's queries see, rounded out to pages."""
        if self.sliding_window is None:
            return self.capacity
        seen = self.sliding_window + self.num_queries + self.page_size
        return min(self.capacity, seen)

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k_pages: jax.Array,
        block_table: jax.Array,
        *,
        softmax_scale: float,
        sliding_window: int | None,
        logit_soft_cap: float | None,
    ) -> "Problem":
        """Reads the facts off the arguments of a checked call."""
        num_seqs, num_queries, num_q_heads, head_dim = q.shape
        num_pages, num_kv_heads, page_size, _ = k_pages.shape
        return cls(
            num_seqs=num_seqs,
            num_queries=num_queries,
            num_kv_heads=num_kv_heads,
            group_size=num_q_heads // num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            num_pages=num_pages,
            pages_per_seq=block_table.shape[1],
            pool_dtype=k_pages.dtype,
            q_dtype=q.dtype,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
        )
