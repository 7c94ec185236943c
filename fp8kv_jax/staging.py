"""The staged window: BF16 rows kept aside until the freeze, and who owns each slot."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Int32

from fp8kv_jax.cache import PagedKVCache

NO_OWNER = -1

type StagedRows = BFloat16[Array, "num_rows num_kv_heads head_dim"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWindow:
    """Rows of the window by calibrating layer, append-only until freeze or reset.

    `slot_owner` says which row each slot holds, -1 for none. Owning by slot rather
    than by order of writing gives last-write-wins for reused slots, for duplicates
    inside one batch, and for copied pages. Every write into the pools that is not an
    append (an import, a load) must set the owner to -1.
    """

    k: tuple[StagedRows, ...]
    v: tuple[StagedRows, ...]
    slot_owner: Int32[Array, "num_slots"]

    @property
    def num_rows(self) -> int:
        return self.k[0].shape[0]


def init_window(
    cache: PagedKVCache, calibrating_layers: tuple[int, ...], num_rows: int
) -> StagedWindow:
    """Makes an empty window of `num_rows` rows for each calibrating layer."""

    def rows() -> tuple[StagedRows, ...]:
        shapes = [cache.k_pages[layer].shape for layer in calibrating_layers]
        return tuple(jnp.zeros((num_rows, s[1], s[3]), jnp.bfloat16) for s in shapes)

    num_slots = cache.num_pages * cache.page_size
    slot_owner = jnp.full((num_slots,), NO_OWNER, jnp.int32)
    return StagedWindow(k=rows(), v=rows(), slot_owner=slot_owner)


def stage(
    window: StagedWindow,
    k: tuple[StagedRows, ...],
    v: tuple[StagedRows, ...],
    *,
    slots: Int32[Array, "num_tokens"],
    real: Bool[Array, "num_tokens"],
    num_staged: Int32[Array, ""],
) -> StagedWindow:
    """Adds a batch's real rows after those staged so far.

    Args:
      window: rows so far; donated by the step.
      k: the batch's rows of each calibrating layer.
      v: likewise.
      slots: the slot of each token.
      real: which tokens are written, observed and counted.
      num_staged: rows that the window holds.
    """
    row = num_staged + jnp.cumsum(real, dtype=jnp.int32) - 1
    row = jnp.where(real, row, window.num_rows)

    def put(rows: StagedRows, new: StagedRows) -> StagedRows:
        return rows.at[row].set(new, mode="drop")

    # Rows only grow, so the largest row naming a slot is the last write to it.
    past_the_end = window.slot_owner.size
    owned = jnp.where(real, slots, past_the_end)
    return StagedWindow(
        k=tuple(map(put, window.k, k)),
        v=tuple(map(put, window.v, v)),
        slot_owner=window.slot_owner.at[owned].max(row, mode="drop"),
    )


def copy_owners(
    window: StagedWindow, page_copies: Int32[Array, "num_copies 2"], page_size: int
) -> StagedWindow:
    """Gives the slots of copied pages the owners of the pages they are copies of."""
    source, destination = page_copies[:, 0], page_copies[:, 1]
    by_page = window.slot_owner.reshape(-1, page_size)
    valid = (source >= 0) & (destination >= 0)
    destination = jnp.where(valid, destination, by_page.shape[0])
    owners = by_page[jnp.maximum(source, 0)]
    by_page = by_page.at[destination].set(owners, mode="drop")
    return StagedWindow(k=window.k, v=window.v, slot_owner=by_page.reshape(-1))


def disown_all(window: StagedWindow) -> StagedWindow:
    """Forgets every owner: after the freeze, and when pages are invalidated."""
    slot_owner = jnp.full_like(window.slot_owner, NO_OWNER)
    return StagedWindow(k=window.k, v=window.v, slot_owner=slot_owner)
