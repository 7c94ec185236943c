"""The staged window: BF16 rows kept aside until the freeze, and who owns each slot."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Int32

from fp8kv_jax.cache import PagedKVCache

NO_OWNER = -1

type Rows = BFloat16[Array, "num_tokens num_kv_heads head_dim"]
type StagedRows = BFloat16[Array, "num_layers num_rows num_kv_heads head_dim"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWindow:
    """Rows of the window by calibrating layer, append-only until freeze or reset.

    All layers' rows are one array, for K and for V: one write stages a batch.

    `slot_owner` says which row each slot holds, -1 for none. Owning by slot rather
    than by order of writing gives last-write-wins for reused slots, for duplicates
    inside one batch, and for copied pages. Every write into the pools that is not an
    append (an import, a load) must set the owner to -1.
    """

    k: StagedRows
    v: StagedRows
    slot_owner: Int32[Array, "num_slots"]

    @property
    def num_rows(self) -> int:
        return self.k.shape[1]


def init_window(
    cache: PagedKVCache, calibrating_layers: tuple[int, ...], num_rows: int
) -> StagedWindow:
    """Makes an empty window of `num_rows` rows for each calibrating layer."""

    _, num_kv_heads, _, head_dim = cache.k_pages[calibrating_layers[0]].shape
    shape = (len(calibrating_layers), num_rows, num_kv_heads, head_dim)
    num_slots = cache.num_pages * cache.page_size
    slot_owner = jnp.full((num_slots,), NO_OWNER, jnp.int32)
    return StagedWindow(
        k=jnp.zeros(shape, jnp.bfloat16),
        v=jnp.zeros(shape, jnp.bfloat16),
        slot_owner=slot_owner,
    )


def stage(
    window: StagedWindow,
    k: Sequence[Rows],
    v: Sequence[Rows],
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
    num_layers, num_rows = window.k.shape[:2]
    layer = jnp.arange(num_layers, dtype=jnp.int32)
    # Over rows of all layers: XLA on a GPU would transpose the window to write into
    # its second axis.
    place = layer[:, None] * num_rows + row[None, :]
    kept = real & (row < num_rows)
    place = jnp.where(kept[None, :], place, num_layers * num_rows).reshape(-1)

    def put(rows: StagedRows, new: Sequence[Rows]) -> StagedRows:
        flat = rows.reshape(-1, *rows.shape[2:])
        flat = flat.at[place].set(jnp.concatenate(new), mode="drop")
        return flat.reshape(rows.shape)

    # Rows only grow, so the largest row naming a slot is the last write to it.
    past_the_end = window.slot_owner.size
    owned = jnp.where(real, slots, past_the_end)
    return StagedWindow(
        k=put(window.k, k),
        v=put(window.v, v),
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
