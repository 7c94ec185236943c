"""What one step works on: new tokens, where they go, and what they may see."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def no_page_copies() -> Int32[Array, "0 2"]:
    return jnp.zeros((0, 2), jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rectangular batch of new tokens: `num_queries` for each sequence.

    Shorter sequences are padded at the end with slot -1; a token is real when its
    slot lies in the pool. Padding is neither written, observed nor counted.

    Attributes:
      token_ids: ids of the new tokens; anything at padding.
      slot_mapping: slot of each new token, -1 for padding.
      query_starts: position of each sequence's first new token.
      seq_lens: valid tokens of each sequence, the new ones included; 0 for none.
      block_table: page of each stretch of a sequence; anything past its end.
      page_copies: (source, destination) pages copied before the layers run, -1 for
        none; destinations are distinct and no destination is also a source.
    """

    token_ids: Int32[Array, "num_seqs num_queries"]
    slot_mapping: Int32[Array, "num_seqs num_queries"]
    query_starts: Int32[Array, "num_seqs"]
    seq_lens: Int32[Array, "num_seqs"]
    block_table: Int32[Array, "num_seqs pages_per_seq"]
    page_copies: Int32[Array, "num_copies 2"] = field(default_factory=no_page_copies)

    @property
    def parts(self) -> tuple["Batch", ...]:
        """The rectangles that attention takes one by one: this one."""
        return (self,)

    @property
    def num_tokens(self) -> int:
        """New tokens, padding included: the static size of the step."""
        return self.slot_mapping.size

    @property
    def positions(self) -> Int32[Array, "num_seqs num_queries"]:
        """Position of each new token in its sequence."""
        steps = jnp.arange(self.slot_mapping.shape[1], dtype=jnp.int32)
        return self.query_starts[:, None] + steps[None, :]

    @property
    def last_query(self) -> Int32[Array, "num_seqs"]:
        """Index of the query that holds each sequence's newest token."""
        last = self.seq_lens - 1 - self.query_starts
        return jnp.clip(last, 0, self.slot_mapping.shape[1] - 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class MixedBatch:
    """Rectangular batches of several shapes that go through a step as one.

    The model sees one row with the tokens of all parts, so that its weights are read
    once; attention takes the parts one by one. Parts may continue one sequence, in
    order: every part is appended before the first one attends.

    Attributes:
      parts: the batches; their page copies are ignored.
      page_copies: see `Batch`.
    """

    parts: tuple[Batch, ...]
    page_copies: Int32[Array, "num_copies 2"] = field(default_factory=no_page_copies)

    @property
    def num_tokens(self) -> int:
        """New tokens, padding included: the static size of the step."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def token_ids(self) -> Int32[Array, "1 num_tokens"]:
        return self._row("token_ids")

    @property
    def slot_mapping(self) -> Int32[Array, "1 num_tokens"]:
        return self._row("slot_mapping")

    @property
    def positions(self) -> Int32[Array, "1 num_tokens"]:
        return self._row("positions")

    @property
    def last_query(self) -> Int32[Array, "num_seqs"]:
        """Place in the row of each sequence's newest token, part after part."""
        places, start = [], 0
        for part in self.parts:
            num_seqs, num_queries = part.slot_mapping.shape
            firsts = start + num_queries * jnp.arange(num_seqs, dtype=jnp.int32)
            places.append(firsts + part.last_query)
            start += part.num_tokens
        return jnp.concatenate(places)

    def _row(self, name: str) -> Int32[Array, "1 num_tokens"]:
        rows = [getattr(part, name).reshape(1, -1) for part in self.parts]
        return jnp.concatenate(rows, axis=1)
