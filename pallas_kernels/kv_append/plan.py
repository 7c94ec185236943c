"""Which token of a batch writes where: derived once per step, shared by all layers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels.kv_append import config

# Up to here comparing all pairs of tokens is one small fusion; above it grows past
# the cost of a scratch array of one entry per slot.
_PAIRWISE_TOKENS = 512


class AppendPlan(NamedTuple):
    """What one slot mapping means for one pair of pools.

    `real` tokens are observed, `slots` says where they belong (-1 for the others);
    `winners` says which of them are written and where (-1 for the others). The rest
    is the work list of the Mosaic kernels: each row of `page_items` is
    `(page, first_token, offset, count)`, a run of `count` tokens for the page's rows
    from `offset` on, where `first_token` is the token that would sit at row 0 (so it
    may be negative); a count of 0 is an empty row. `scattered` lists the real tokens
    outside all runs, the first `num_scattered` entries; the rest is -1.
    """

    real: Bool[Array, "num_tokens"]
    slots: Int[Array, "num_tokens"]
    winners: Int[Array, "num_tokens"]
    num_dropped: Int[Array, ""]
    page_items: Int[Array, "num_items 4"]
    scattered: Int[Array, "num_tokens"]
    num_scattered: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("num_pages", "page_size", "page_tiles"))
def plan_append(
    slot_mapping: Int[Array, "num_tokens"],
    *,
    num_pages: int,
    page_size: int,
    page_tiles: bool | None = None,
) -> AppendPlan:
    """Derives from a slot mapping all that `kv_append` needs beside the rows.

    Made once per step, on the device; correct for every slot mapping. A plan serves
    all pools of the same `num_pages` and `page_size`.

    Args:
      slot_mapping: slot of each new token. Negative is padding, neither written nor
        observed; so is a slot past the pool, which is counted as dropped. Where
        several tokens name one slot, the last is written and all are observed.
      num_pages: pages of the pools.
      page_size: tokens a page holds.
      page_tiles: whether long runs of consecutive slots move as whole tiles on
        Mosaic; changes the speed, never the result. None: for more tokens than a
        decode step has.

    Returns:
      The plan.

    Raises:
      ValueError: if slot_mapping is not a vector of int32 with at least one token.
    """
    if slot_mapping.ndim != 1 or slot_mapping.size == 0:
        raise ValueError(
            "Expected slot_mapping to be [num_tokens] with at least one token, got "
            f"shape {slot_mapping.shape}."
        )
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(
            f"Expected slot_mapping to be int32, got {slot_mapping.dtype}."
        )
    num_slots = num_pages * page_size
    real = (slot_mapping >= 0) & (slot_mapping < num_slots)
    slots = jnp.where(real, slot_mapping, -1)
    winners = jnp.where(_is_last_of_slot(slots, num_slots), slots, -1)
    page_items, in_items = _page_items(winners, num_pages, page_size, page_tiles)
    left_over = real & ~in_items
    return AppendPlan(
        real=real,
        slots=slots,
        winners=winners,
        num_dropped=jnp.sum(slot_mapping >= num_slots, dtype=jnp.int32),
        page_items=page_items,
        scattered=_compact(left_over),
        num_scattered=jnp.sum(left_over, dtype=jnp.int32),
    )


def _is_last_of_slot(
    slots: Int[Array, "num_tokens"], num_slots: int
) -> Bool[Array, "num_tokens"]:
    """Says which tokens no later token of the batch overrules; any value at -1."""
    token = jnp.arange(slots.size, dtype=jnp.int32)
    if slots.size <= _PAIRWISE_TOKENS:
        same = slots[:, None] == slots[None, :]
        later = token[:, None] < token[None, :]
        return ~jnp.any(same & later, axis=1)
    # JAX wraps -1 to the last entry even with mode="drop": send it past the end.
    slots = jnp.where(slots < 0, num_slots, slots)
    last = jnp.full((num_slots,), -1, jnp.int32).at[slots].max(token, mode="drop")
    return last.at[slots].get(mode="fill", fill_value=-1) == token


def _page_items(
    winners: Int[Array, "num_tokens"],
    num_pages: int,
    page_size: int,
    page_tiles: bool | None,
) -> tuple[Int[Array, "num_items 4"], Bool[Array, "num_tokens"]]:
    """Lists runs that own their page, and says which tokens they cover.

    A run is a stretch of tokens in consecutive slots of one page. It becomes an item
    if it is long enough to be worth a tile, if no other winner of the batch writes
    to its page (tiles of one page would race) and if the list still has room.
    """
    num_tokens = winners.size
    num_items = config.num_page_items(num_tokens, page_size, page_tiles)
    if num_items == 0:
        return jnp.zeros((0, 4), jnp.int32), jnp.zeros((num_tokens,), bool)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    wins = winners >= 0
    # Plain division: only quotients of winners count, and floor division costs more.
    rows_per_page = jnp.int32(page_size)
    before = jnp.concatenate([jnp.full((1,), -2, jnp.int32), winners[:-1]])
    starts = wins & ((winners != before + 1) | (lax.rem(winners, rows_per_page) == 0))
    page = jnp.where(wins, lax.div(winners, rows_per_page), num_pages)
    runs_of_page = jnp.zeros((num_pages,), jnp.int32)
    runs_of_page = runs_of_page.at[page].add(starts.astype(jnp.int32), mode="drop")

    # One entry per run from here on, the run's index being its place in the batch.
    run = jnp.where(wins, jnp.cumsum(starts, dtype=jnp.int32) - 1, num_tokens)
    none = jnp.zeros((num_tokens,), jnp.int32)
    count = none.at[run].add(1, mode="drop")
    first = none.at[jnp.where(starts, run, num_tokens)].set(token, mode="drop")
    run_page = page[first]
    alone = runs_of_page.at[run_page].get(mode="fill", fill_value=0) == 1
    taken = (count >= config.MIN_RUN_TOKENS) & alone
    row = jnp.cumsum(taken, dtype=jnp.int32) - 1
    taken &= row < num_items

    offset = lax.rem(winners[first], rows_per_page)
    items = jnp.stack([run_page, first - offset, offset, count], axis=1)
    row = jnp.where(taken, row, num_items)
    page_items = jnp.zeros((num_items, 4), jnp.int32).at[row].set(items, mode="drop")
    return page_items, taken.at[run].get(mode="fill", fill_value=False)


def _compact(which: Bool[Array, "num_tokens"]) -> Int[Array, "num_tokens"]:
    """Lists the tokens where `which` holds, in order, the rest of the list -1."""
    token = jnp.arange(which.size, dtype=jnp.int32)
    place = jnp.where(which, jnp.cumsum(which, dtype=jnp.int32) - 1, which.size)
    return jnp.full_like(token, -1).at[place].set(token, mode="drop")
