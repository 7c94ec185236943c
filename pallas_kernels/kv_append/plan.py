"""Which token of a batch writes where: derived once per step, shared by all layers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.kv_append import config

# Up to here comparing all pairs is one small fusion; above it grows past the cost of
# scattering into one entry for each slot and page.
_PAIRWISE_TOKENS = 2048
# In `AppendPlan.scattered`: observed, though a later token has its slot.
OVERRULED = -2


class AppendPlan(NamedTuple):
    """What one slot mapping means for one pair of pools.

    `real` tokens are observed, `slots` says where they belong (-1 for the others);
    `winners` says which of them are written and where (-1 for the others). The rest
    is the work list of the Mosaic kernels, empty for a decode step. The first
    `num_items` rows of `page_items` are `(page, first_token, offset, count)`, a run
    of `count` tokens for the page's rows from `offset` on, where `first_token` is
    the token that would sit at row 0 (so it may be negative). `scattered` says where
    the real tokens outside all runs are written, OVERRULED for those that are not
    and -1 for all others; the first `num_blocks` of `blocks` are the groups of
    BLOCK_TOKENS tokens that hold any of them.
    """

    real: Bool[Array, "num_tokens"]
    slots: Int[Array, "num_tokens"]
    winners: Int[Array, "num_tokens"]
    num_dropped: Int[Array, ""]
    page_items: Int[Array, "max_blocks 4"]
    num_items: Int[Array, ""]
    scattered: Int[Array, "num_tokens"]
    blocks: Int[Array, "max_blocks"]
    num_blocks: Int[Array, ""]


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
    census = _take_census(slots, num_pages, page_size)
    winners = jnp.where(census.is_last, slots, -1)
    tiles = config.uses_page_tiles(slots.size, page_size, page_tiles)
    return AppendPlan(
        real,
        slots,
        winners,
        jnp.sum(slot_mapping >= num_slots, dtype=jnp.int32),
        *_work_lists(slots, winners, census, page_size, tiles),
    )


class _Census(NamedTuple):
    """What each token needs to know of the others; any value for padding.

    A run is a stretch of tokens in consecutive slots of one page.
    """

    starts: Bool[Array, "num_tokens"]
    is_last: Bool[Array, "num_tokens"]
    runs_of_page: Int[Array, "num_tokens"]
    tokens_of_page: Int[Array, "num_tokens"]


def _take_census(
    slots: Int[Array, "num_tokens"], num_pages: int, page_size: int
) -> _Census:
    """Says which token starts a run, is its slot's last, and what its page gets."""
    num_slots = num_pages * page_size
    token = jnp.arange(slots.size, dtype=jnp.int32)
    real = slots >= 0
    # Plain division: only quotients of slots count, and floor division costs more.
    rows_per_page = jnp.int32(page_size)
    before = lax.pad(slots, jnp.int32(-2), ((1, -1, 0),))
    starts = real & ((slots != before + 1) | (lax.rem(slots, rows_per_page) == 0))
    page = jnp.where(real, lax.div(slots, rows_per_page), num_pages)
    if slots.size <= _PAIRWISE_TOKENS:
        overruled = (slots[:, None] == slots[None, :]) & (
            token[:, None] < token[None, :]
        )
        same_page = page[:, None] == page[None, :]
        overruled, runs, tokens = _row_sums(
            overruled, same_page & starts[None, :], same_page
        )
        return _Census(starts, overruled == 0, runs, tokens)
    # JAX wraps -1 to the last entry even with mode="drop": send it past the end.
    slot = jnp.where(real, slots, num_slots)
    last = jnp.full((num_slots,), -1, jnp.int32).at[slot].max(token, mode="drop")
    is_last = last.at[slot].get(mode="fill", fill_value=-1) == token
    counted = jnp.stack([starts.astype(jnp.int32), jnp.ones_like(token)], axis=1)
    totals = jnp.zeros((num_pages, 2), jnp.int32).at[page].add(counted, mode="drop")
    runs, tokens = totals.at[page].get(mode="fill", fill_value=0).T
    return _Census(starts, is_last, runs, tokens)


def _work_lists(
    slots: Int[Array, "num_tokens"],
    winners: Int[Array, "num_tokens"],
    census: _Census,
    page_size: int,
    tiles: bool,
) -> tuple[Array, ...]:
    """Lists the runs that move as tiles, and the blocks of tokens that do not.

    A run becomes an item if it is alone in its page (tiles of one page would race)
    and long enough to be worth a tile. So the tokens of an item all win, they are all
    that its page gets, and a block of as many tokens as an item has at least holds
    the start of one at most.
    """
    none, zero = jnp.zeros((0,), jnp.int32), jnp.int32(0)
    if not tiles:
        return jnp.zeros((0, 4), jnp.int32), zero, none, none, zero
    real = slots >= 0
    in_item = (
        real
        & (census.runs_of_page == 1)
        & (census.tokens_of_page >= config.BLOCK_TOKENS)
    )
    lost = jnp.where(real, OVERRULED, -1)
    scattered = jnp.where(in_item, -1, jnp.where(winners < 0, lost, winners))
    token = jnp.arange(slots.size, dtype=jnp.int32)
    start = jnp.where(in_item & census.starts, token + 1, 0)
    start, num_left = _row_sums(_in_blocks(start), _in_blocks(scattered + 1) != 0)
    (item_blocks, num_items), (blocks, num_blocks) = _indices(start > 0, num_left > 0)

    start = start[item_blocks] - 1
    rows_per_page = jnp.int32(page_size)
    page, offset = (
        lax.div(slots[start], rows_per_page),
        lax.rem(slots[start], rows_per_page),
    )
    items = jnp.stack([page, start - offset, offset, census.tokens_of_page[start]], 1)
    return items, num_items, scattered, blocks, num_blocks


def _row_sums(*terms: Shaped[Array, "rows columns"]) -> tuple[Int[Array, "rows"], ...]:
    """Sums rows of several matrices of one shape, in one kernel."""

    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    terms = tuple(x.astype(jnp.int32) for x in terms)
    return tuple(lax.reduce(terms, (jnp.int32(0),) * len(terms), add, (1,)))


def _in_blocks(x: Int[Array, "num_tokens *rest"]) -> Int[Array, "blocks size *rest"]:
    """Cuts tokens into blocks, zeros after the last."""
    missing = -x.shape[0] % config.BLOCK_TOKENS
    x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, config.BLOCK_TOKENS, *x.shape[1:])


def _indices(
    *flags: Bool[Array, "size"],
) -> list[tuple[Int[Array, "size"], Int[Array, ""]]]:
    """Lists where each flag holds, in order and then anything, and counts them."""
    size = flags[0].size
    if size > _PAIRWISE_TOKENS:
        found = [jnp.nonzero(x, size=size, fill_value=0)[0] for x in flags]
        counts = [jnp.sum(x, dtype=jnp.int32) for x in flags]
        return [(x.astype(jnp.int32), n) for x, n in zip(found, counts, strict=True)]
    index = jnp.arange(size, dtype=jnp.int32)
    # One row more: all indices are before that, so it counts them.
    rows = jnp.arange(size + 1, dtype=jnp.int32)[:, None]
    places = _row_sums(*((index[None, :] < rows) & x[None, :] for x in flags))
    found = _row_sums(
        *(
            jnp.where((n[None, :-1] == index[:, None]) & x[None, :], index[None, :], 0)
            for n, x in zip(places, flags, strict=True)
        )
    )
    return [(x, n[-1]) for x, n in zip(found, places, strict=True)]
