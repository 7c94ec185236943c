"""Shapes of steps, and plans laid out in them as batches."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8kv_jax.batch import Batch, MixedBatch
from fp8kv_jax.serving.scheduler import Chunk, Plan
from pallas_kernels.pages import PAD_SLOT


class Shape(NamedTuple):
    """Rows of one token, and rows of a chunk, that a step is padded to."""

    decode_rows: int
    prefill_rows: int


class Layout:
    """Picks the shape of each step and fills it; arrays stay on the host.

    Args:
      decode_buckets: numbers of decoding rows, ascending.
      prefill_buckets: likewise of prefill rows; 0 for a step without any.
      chunk: tokens of a prefill row.
      page_size: tokens a page holds.
      pages_per_seq: width of the block tables.
    """

    def __init__(
        self,
        *,
        decode_buckets: Sequence[int],
        prefill_buckets: Sequence[int],
        chunk: int,
        page_size: int,
        pages_per_seq: int,
    ) -> None:
        self.decode_buckets = tuple(decode_buckets)
        self.prefill_buckets = tuple(prefill_buckets)
        self.chunk = chunk
        self.page_size = page_size
        self.pages_per_seq = pages_per_seq

    @property
    def shapes(self) -> list[Shape]:
        return [
            Shape(decode_rows, prefill_rows)
            for decode_rows in self.decode_buckets
            for prefill_rows in self.prefill_buckets
        ]

    @property
    def max_rows(self) -> int:
        """Rows of logits of the largest shape."""
        return self.decode_buckets[-1] + self.prefill_buckets[-1]

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of the largest shape, padding included."""
        return self.decode_buckets[-1] + self.prefill_buckets[-1] * self.chunk

    def shape_of(self, plan: Plan) -> Shape:
        """The smallest shape that holds a plan."""
        return Shape(
            next(rows for rows in self.decode_buckets if rows >= len(plan.decode)),
            next(rows for rows in self.prefill_buckets if rows >= len(plan.prefill)),
        )

    def batch(self, plan: Plan, shape: Shape) -> MixedBatch:
        """Lays a plan out; its page copies are not part of the batch."""
        parts = [self._part(plan.decode, shape.decode_rows, 1)]
        if shape.prefill_rows:
            parts.append(self._part(plan.prefill, shape.prefill_rows, self.chunk))
        none: Any = np.zeros((0, 2), np.int32)
        return MixedBatch(parts=tuple(parts), page_copies=none)

    def _part(self, chunks: Iterable[Chunk], num_rows: int, width: int) -> Batch:
        token_ids = np.zeros((num_rows, width), np.int32)
        query_starts = np.zeros(num_rows, np.int32)
        seq_lens = np.zeros(num_rows, np.int32)
        block_table = np.zeros((num_rows, self.pages_per_seq), np.int32)
        for row, chunk in enumerate(chunks):
            start, stop, pages = chunk.start, chunk.stop, chunk.sequence.pages
            token_ids[row, : stop - start] = chunk.sequence.tokens[start:stop]
            query_starts[row] = start
            seq_lens[row] = stop
            block_table[row, : len(pages)] = pages
        positions = query_starts[:, None] + np.arange(width, dtype=np.int32)
        in_table = np.minimum(positions // self.page_size, self.pages_per_seq - 1)
        slots = np.take_along_axis(block_table, in_table, axis=1) * self.page_size
        slots += positions % self.page_size
        real = positions < seq_lens[:, None]
        slot_mapping = np.where(real, slots, np.int32(PAD_SLOT))
        # The step that takes them moves them to the device, all at once.
        fields: dict[str, Any] = {
            "token_ids": token_ids,
            "slot_mapping": slot_mapping,
            "query_starts": query_starts,
            "seq_lens": seq_lens,
            "block_table": block_table,
            "page_copies": np.zeros((0, 2), np.int32),
        }
        return Batch(**fields)


def buckets_up_to(largest: int, *, smallest: int, factor: int) -> tuple[int, ...]:
    """A few sizes up to `largest`, each `factor` times the one before.

    8 to 200 by 4 gives 8, 32, 128, 200.
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)
