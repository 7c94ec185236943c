"""Which pages belong to which sequence: the host's side of a paged cache."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fp8kv_jax.batch import Batch
from pallas_kernels.pages import PAD_SLOT


class OutOfPagesError(RuntimeError):
    """The pool has no free page left; nothing was taken."""


class BlockTable:
    """Pages of a fixed number of sequences, taken from one pool as they grow.

    Args:
      num_pages: pages of the pool.
      page_size: tokens a page holds.
      num_seqs: sequences, by index.
      max_seq_len: longest sequence, in tokens; fixes the table's width.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_seqs: int, max_seq_len: int
    ) -> None:
        self.page_size = page_size
        self.pages_per_seq = -(-max_seq_len // page_size)
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: list[list[int]] = [[] for _ in range(num_seqs)]

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def pages(self, seq: int) -> tuple[int, ...]:
        """Pages of a sequence, in order."""
        return tuple(self._pages[seq])

    def grow(self, seq: int, num_tokens: int) -> None:
        """Makes room for a sequence of `num_tokens` tokens.

        Raises:
          ValueError: if the table is too narrow for it.
          OutOfPagesError: if the pool is exhausted; the sequence keeps what it has.
        """
        pages = self._pages[seq]
        needed = -(-num_tokens // self.page_size)
        if needed > self.pages_per_seq:
            raise ValueError(
                f"Expected a sequence of at most {self.pages_per_seq * self.page_size} "
                f"tokens, the width of the block table, got {num_tokens}."
            )
        missing = needed - len(pages)
        if missing > len(self._free):
            raise OutOfPagesError(
                f"Expected {missing} free pages for {num_tokens} tokens of sequence "
                f"{seq}, got {len(self._free)}: free a sequence or make the pool "
                "larger."
            )
        for _ in range(missing):
            pages.append(self._free.pop())

    def free(self, seq: int) -> None:
        """Returns a sequence's pages to the pool."""
        self._free.extend(reversed(self._pages[seq]))
        self._pages[seq] = []

    def slots(self, seq: int, start: int, num_tokens: int) -> np.ndarray:
        """Slots of `num_tokens` tokens from position `start` on: int32."""
        positions = np.arange(start, start + num_tokens)
        pages = np.asarray(self._pages[seq], np.int32)
        page = pages[positions // self.page_size]
        return (page * self.page_size + positions % self.page_size).astype(np.int32)

    def array(self, seqs: Sequence[int]) -> np.ndarray:
        """The block table of some sequences: int32 [num_seqs, pages_per_seq]."""
        table = np.zeros((len(seqs), self.pages_per_seq), np.int32)
        for i, seq in enumerate(seqs):
            table[i, : len(self._pages[seq])] = self._pages[seq]
        return table


def make_batch(
    table: BlockTable,
    tokens: dict[int, Sequence[int]],
    starts: dict[int, int],
    *,
    num_queries: int,
    num_seqs: int | None = None,
) -> Batch:
    """Lays out new tokens of some sequences as one rectangular batch.

    Grows each sequence to hold them. Rows past the given sequences, and queries past
    a sequence's tokens, are padding.

    Args:
      table: the pages; changed.
      tokens: new token ids of each sequence.
      starts: position of each sequence's first new token.
      num_queries: width of the batch, at least the longest of `tokens`.
      num_seqs: height of the batch; the number of sequences by default.
    """
    seqs = list(tokens)
    num_seqs = len(seqs) if num_seqs is None else num_seqs
    token_ids = np.zeros((num_seqs, num_queries), np.int32)
    slot_mapping = np.full((num_seqs, num_queries), PAD_SLOT, np.int32)
    query_starts = np.zeros(num_seqs, np.int32)
    seq_lens = np.zeros(num_seqs, np.int32)
    for i, seq in enumerate(seqs):
        new, start = tokens[seq], starts[seq]
        table.grow(seq, start + len(new))
        token_ids[i, : len(new)] = new
        slot_mapping[i, : len(new)] = table.slots(seq, start, len(new))
        query_starts[i], seq_lens[i] = start, start + len(new)
    block_table = np.zeros((num_seqs, table.pages_per_seq), np.int32)
    block_table[: len(seqs)] = table.array(seqs)
    return Batch(
        token_ids=jnp.asarray(token_ids),
        slot_mapping=jnp.asarray(slot_mapping),
        query_starts=jnp.asarray(query_starts),
        seq_lens=jnp.asarray(seq_lens),
        block_table=jnp.asarray(block_table),
    )
