"""Which pages a freeze rewrites: derived once on the device, shared by all layers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# In `RequantizePlan.first_rows`: no one copy brings the page's rows.
NO_RUN = -(2**31)


class RequantizePlan(NamedTuple):
    """The work list of a freeze.

    The first `count` entries are live. `pages` lists the pages that hold an owned
    slot, ascending. `first_rows` says what one bulk copy needs: if the owned slots of
    a page hold consecutive ascending rows, the row that offset 0 would hold, which
    may lie before the first; else NO_RUN.
    """

    pages: Int[Array, "num_pages"]
    first_rows: Int[Array, "num_pages"]
    count: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("page_size",))
def plan_requantize(
    slot_owner: Int[Array, "num_slots"], *, page_size: int
) -> RequantizePlan:
    """Compacts the pages that hold at least one owned slot.

    Args:
      slot_owner: row of the staged window that a slot holds, negative for none.
      page_size: tokens a page holds.

    Returns:
      the plan that `requantize_staged` takes, for any layer of this ownership.

    Raises:
      ValueError: if slot_owner is not a whole number of pages of int32.
    """
    if slot_owner.ndim != 1 or slot_owner.dtype != jnp.int32:
        raise ValueError(
            "Expected slot_owner to be int32 [num_slots], got "
            f"{slot_owner.dtype} {slot_owner.shape}."
        )
    if page_size < 1 or slot_owner.size % page_size:
        raise ValueError(
            f"Expected {slot_owner.shape=} to be a whole number of pages, "
            f"got {page_size=}."
        )
    owners = slot_owner.reshape(-1, page_size)
    owned = owners >= 0
    touched = owned.any(axis=1)
    # Equal differences of row and offset mean consecutive rows: 7, 8, -, 10 -> 7.
    first = owners - jnp.arange(page_size, dtype=jnp.int32)[None, :]
    limits = jnp.iinfo(jnp.int32)
    lowest = jnp.where(owned, first, limits.max).min(axis=1, initial=limits.max)
    highest = jnp.where(owned, first, limits.min).max(axis=1, initial=limits.min)
    bulk = lowest == highest
    num_pages = owners.shape[0]
    (pages,) = jnp.nonzero(touched, size=num_pages, fill_value=0)
    pages = pages.astype(jnp.int32)
    return RequantizePlan(
        pages=pages,
        first_rows=jnp.where(bulk, lowest, NO_RUN)[pages],
        count=touched.sum(dtype=jnp.int32),
    )
