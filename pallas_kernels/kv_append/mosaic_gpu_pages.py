"""The append of a long batch: persistent programs move page tiles, then the rest."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.kv_append import mosaic_gpu_statistics as stats
from pallas_kernels.kv_append.config import BLOCK_TOKENS, TILE_COLUMNS, AppendConfig
from pallas_kernels.kv_append.mosaic_gpu_rows import (
    WARPGROUP,
    WARPS,
    block_layout,
    row_layout,
    scale_and_clip,
    store_narrow,
)
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.pages.layout import PAD_SLOT, Rows

_LAYOUT = plgpu.Layout.WGMMA
# Tokens of a register tile, as many as it has columns: K's and V's look alike.
_PIECE = 64
# Fewer take fewer registers (the layout has at least 8), more are lowered faster.
_TALLY_COLUMNS = 16


class _Lists(NamedTuple):
    """The lists of a plan."""

    page_items: Any  # [max_blocks, 4]
    num_items: Any  # [1]
    scattered: Any  # [num_tokens]
    blocks: Any  # [max_blocks]
    num_blocks: Any  # [1]


class _Ring(NamedTuple):
    """Scratch for the tiles in flight. A tile is blended in place; V's is turned."""

    rows: Any  # [num_stages, pieces, 64 tokens, 64 columns] of the rows' dtype
    tile: Any  # [num_stages, pieces, 64, 64] of the pool's dtype
    rows_barrier: Any  # [num_stages]
    tile_barrier: Any  # [num_stages]


class _Share(NamedTuple):
    """What one program serves: one head of K (`token_axis` 0) or of V (1)."""

    token_axis: int
    rows: Any  # [num_tokens, num_kv_heads, head_dim]
    pages: Any  # as in pages/layout.py
    head: jax.Array
    inv_scale: jax.Array | None
    part: jax.Array
    num_parts: int

    def turns(self, count: jax.Array) -> jax.Array:
        """Counts `part`, `part + num_parts`, ... below `count`."""
        return lax.div(count - self.part + (self.num_parts - 1), self.num_parts)

    def page(self, page: jax.Array, tokens: Any, columns: Any) -> Any:
        """Views the place of some tokens' columns in a page."""
        if self.token_axis == 0:
            return self.pages.at[page, self.head, tokens, columns]
        return self.pages.at[page, self.head, columns, tokens]


class _Run(NamedTuple):
    """A row of a plan's page items, and which columns of it to move."""

    page: jax.Array
    first_token: jax.Array
    offset: jax.Array
    count: jax.Array
    columns: Any

    def covers(self, row: jax.Array) -> jax.Array:
        """Says which rows of the page belong to the run's tokens."""
        return (row >= self.offset) & (row < self.offset + self.count)


def append_pages(
    k_pages_ref: Any,
    v_pages_ref: Any,
    k: Rows,
    v: Rows,
    plan: AppendPlan,
    inv_scales: tuple[Float[Array, "num_kv_heads"], ...],
    *,
    statistics: bool,
    config: AppendConfig,
    interpret: Any = None,
) -> tuple[stats.Partials, int] | None:
    """Writes a plan's page items and scattered tokens into the pools behind two refs.

    Programs take turns at the tiles of one head of K or of V, then at its scattered
    rows. A tile is 64 columns of an item: its rows are loaded for a whole page, of
    which those outside the item are masked, so a page that the item fills in part is
    read, blended and written back. Rows before the first or past the last token of
    the batch are only loaded, never used; the copy engine fills them with zeros. V
    is turned by transposing loads from shared memory.

    Returns:
      partials and how many of them count, if asked for.

    Raises:
      NotImplementedError: if statistics are asked for of too many tokens.
    """
    num_kv_heads, page_size, _ = k_pages_ref.shape[1:]
    num_groups, num_pieces = 2 * num_kv_heads, page_size // _PIECE
    num_parts = max(1, config.num_programs // num_groups)
    stages = config.num_stages
    if statistics:
        _check_tallies_hold(k, num_pieces, num_parts)
    if interpret is not None:
        k, v, plan = _pad_front(k, v, plan, page_size)

    def smem(dtype: Any) -> Any:
        shape = (stages, num_pieces, _PIECE, TILE_COLUMNS)
        swizzle = plgpu.SwizzleTransform(TILE_COLUMNS * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(swizzle,))

    barrier = plgpu.Barrier(num_arrivals=num_pieces, num_barriers=stages)
    out_type = stats.partials_shape(num_parts, num_kv_heads) if statistics else ()
    partials = plgpu.kernel(
        functools.partial(_kernel, num_parts=num_parts, statistics=statistics),
        out_type=out_type,
        scratch_types=(smem(k.dtype), smem(k_pages_ref.dtype), barrier, barrier),
        grid=(num_parts * num_groups,),
        grid_names=("program",),
        kernel_name="kv_append_pages",
        compiler_params=WARPGROUP,
        interpret=interpret,
    )(
        k,
        v,
        plan.page_items,
        plan.num_items.reshape(1),
        plan.scattered,
        plan.blocks,
        plan.num_blocks.reshape(1),
        *inv_scales,
        k_pages_ref,
        v_pages_ref,
    )
    return (stats.Partials(*partials), num_parts) if statistics else None


def _check_tallies_hold(k: Rows, num_pieces: int, num_parts: int) -> None:
    num_tokens, _, head_dim = k.shape
    # No item is shorter than a block.
    tiles = pl.cdiv(num_tokens, BLOCK_TOKENS) * head_dim // TILE_COLUMNS
    values = pl.cdiv(tiles, num_parts) * num_pieces * TILE_COLUMNS // _TALLY_COLUMNS
    if values > stats.MOST_VALUES:
        raise NotImplementedError(
            f"Mosaic's kv_append counts at most {stats.MOST_VALUES} values in one "
            f"entry of a tally, {num_tokens=} may give it {values}: append them in "
            "several calls."
        )


def _kernel(
    k_gmem: Any, v_gmem: Any, *refs: Any, num_parts: int, statistics: bool
) -> None:
    # the lists; inverse scales if the pools are FP8; pools; partials if asked for;
    # scratch
    lists, middle, ring = _Lists(*refs[:5]), refs[5:-4], _Ring(*refs[-4:])
    first_partial = len(middle) - 2 * statistics
    *inv_scales_gmem, k_pages_gmem, v_pages_gmem = middle[:first_partial]
    partials_gmem = middle[first_partial:]
    num_kv_heads = k_gmem.shape[1]
    program = lax.axis_index("program")
    part = lax.div(program, jnp.int32(2 * num_kv_heads))
    group = lax.rem(program, jnp.int32(2 * num_kv_heads))
    side = lax.div(group, jnp.int32(num_kv_heads))
    head = lax.rem(group, jnp.int32(num_kv_heads))

    def append(index: int, rows: Any, pages: Any) -> None:
        inv_scale = inv_scales_gmem[index][head] if inv_scales_gmem else None
        share = _Share(index, rows, pages, head, inv_scale, part, num_parts)
        limits = None
        if statistics and inv_scale is not None:
            limits = stats.find_limits(inv_scale)
        totals = _append_items(share, lists, ring, limits)
        others = _append_scattered(share, lists, limits)
        if totals is not None and others is not None:
            amax, *counts = totals.join(others)
            amax_gmem, counts_gmem = partials_gmem
            amax_gmem[index, head, part] = amax
            for i, count in enumerate(counts):
                counts_gmem[i, index, head, part] = count

    pl.when(side == 0)(lambda: append(0, k_gmem, k_pages_gmem))
    pl.when(side == 1)(lambda: append(1, v_gmem, v_pages_gmem))


def _append_items(
    share: _Share, lists: _Lists, ring: _Ring, limits: stats.Limits | None
) -> stats.Totals | None:
    """Moves this program's tiles through a ring that refills itself.

    With limits they are counted, too, while their codes leave.
    """
    stages, num_pieces = ring.rows.shape[:2]
    num_columns = share.rows.shape[2] // TILE_COLUMNS
    turns = share.turns(lists.num_items[0] * num_columns)
    counter = None
    if limits is not None:
        counter = stats.Counter((_PIECE, _TALLY_COLUMNS), limits, _LAYOUT)
    # Tokens of a piece, in their page.
    pieces = [pl.ds(i * _PIECE, _PIECE) for i in range(num_pieces)]

    def find(turn: jax.Array) -> tuple[_Run, jax.Array]:
        tile = share.part + turn * share.num_parts
        item = lax.div(tile, jnp.int32(num_columns))
        column = lax.rem(tile, jnp.int32(num_columns)) * TILE_COLUMNS
        page, first_token, offset, count = (lists.page_items[item, i] for i in range(4))
        columns = pl.ds(column, TILE_COLUMNS)
        run = _Run(page, first_token, offset, count, columns)
        return run, lax.rem(turn, jnp.int32(stages))

    def is_whole(run: _Run) -> jax.Array:
        return run.count == num_pieces * _PIECE

    def start(turn: jax.Array) -> None:
        """Copies a tile's rows, and what its page holds if that is to blend."""
        run, stage = find(turn)
        for i in range(num_pieces):
            tokens = pl.ds(run.first_token + i * _PIECE, _PIECE)
            rows = share.rows.at[tokens, share.head, run.columns]
            plgpu.copy_gmem_to_smem(
                rows, ring.rows.at[stage, i], ring.rows_barrier.at[stage]
            )

        @pl.when(jnp.logical_not(is_whole(run)))
        def _() -> None:
            for i, tokens in enumerate(pieces):
                page = share.page(run.page, tokens, run.columns)
                plgpu.copy_gmem_to_smem(
                    page, ring.tile.at[stage, i], ring.tile_barrier.at[stage]
                )

    def take(turn: jax.Array, tally: stats.Tally | None) -> stats.Tally | None:
        run, stage = find(turn)
        rows, tile = ring.rows.at[stage], ring.tile.at[stage]
        plgpu.barrier_wait(ring.rows_barrier.at[stage])
        pl.when(is_whole(run))(lambda: _fill(share, rows, tile))

        @pl.when(jnp.logical_not(is_whole(run)))
        def _() -> None:
            plgpu.barrier_wait(ring.tile_barrier.at[stage])
            _fill(share, rows, tile, blend=run)

        plgpu.commit_smem()
        for i, tokens in enumerate(pieces):
            page = share.page(run.page, tokens, run.columns)
            is_last = i == num_pieces - 1
            plgpu.copy_smem_to_gmem(tile.at[i], page, commit_group=is_last)
        if counter is not None:
            count = functools.partial(_count_piece, counter, rows, run)
            tally = lax.fori_loop(0, num_pieces, count, tally)
        refill(turn)
        return tally

    def refill(turn: jax.Array) -> None:
        # All threads are past the turn before: its stage is free once its tile has
        # been read. With one stage that is this turn's.
        lag = min(1, stages - 1)
        plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
        start_if(turn - lag + stages)

    def start_if(turn: jax.Array) -> None:
        pl.when(turn < turns)(lambda: start(turn))

    for turn in range(max(1, stages - 1)):
        start_if(jnp.int32(turn))
    tally = lax.fori_loop(0, turns, take, None if counter is None else counter.nothing)
    plgpu.wait_smem_to_gmem(0)
    return None if tally is None else tally.totals()


def _count_piece(
    counter: stats.Counter, rows: Any, run: _Run, i: jax.Array, tally: stats.Tally
) -> stats.Tally:
    row = i * _PIECE + plgpu.broadcasted_iota(
        jnp.int32, (_PIECE,), 0, layout=_LAYOUT.reduce(1)
    )
    return counter.count(tally, _load(rows.at[i]), run.covers(row))


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_LAYOUT, optimized=False)


def _fill(share: _Share, rows: Any, tile: Any, *, blend: _Run | None = None) -> None:
    """Writes codes into a tile, with `blend` over what it holds outside that run."""
    turned = share.token_axis == 1

    # Loops over pieces stay rolled: unrolled they hold all rows in registers, which
    # bounds how many programs an SM holds.
    @pl.loop(0, tile.shape[0])
    def _(i: jax.Array) -> None:
        x = _load(rows.at[i].transpose((1, 0)) if turned else rows.at[i])
        code = scale_and_clip(x, share.inv_scale)
        if blend is not None:
            old = _load(tile.at[i])
            if share.inv_scale is not None:
                # E4M3 widens through float16 in hardware; codes come back unchanged
                old = old.astype(jnp.float16).astype(jnp.float32)
            row = i * _PIECE + plgpu.broadcasted_iota(
                jnp.int32, code.shape, share.token_axis, layout=_LAYOUT
            )
            code = jnp.where(blend.covers(row), code, old)
        tile[i] = code.astype(tile.dtype)


def _append_scattered(
    share: _Share, lists: _Lists, limits: stats.Limits | None
) -> stats.Totals | None:
    """Writes the tokens outside all items, row by row, for this program's blocks."""
    num_tokens, _, head_dim = share.rows.shape
    page_size = jnp.int32(share.pages.shape[2 + share.token_axis])
    layout = row_layout(head_dim)
    head = pl.ds(share.head, 1)

    def write(slot: jax.Array, x: jax.Array) -> None:
        page, token = lax.div(slot, page_size), lax.rem(slot, page_size)
        place = (
            share.pages.at[page, head, token]
            if share.token_axis == 0
            else share.pages.at[page, head, :, token]
        )
        code = scale_and_clip(x, share.inv_scale).astype(share.pages.dtype)
        pl.when(slot >= 0)(lambda: store_narrow(place, code))

    def load(block: jax.Array, i: Any) -> tuple[jax.Array, jax.Array]:
        token = block * BLOCK_TOKENS + i
        inside = jnp.minimum(token, num_tokens - 1)
        slot = jnp.where(token < num_tokens, lists.scattered[inside], PAD_SLOT)
        row = share.rows.at[inside, head]
        return slot, plgpu.load(row, layout=layout, optimized=False)

    def take(turn: jax.Array) -> jax.Array:
        block = lists.blocks[share.part + turn * share.num_parts]
        # All loads before the first store: their latencies overlap.
        for slot, x in [load(block, i) for i in range(BLOCK_TOKENS)]:
            write(slot, x)
        return block

    turns = share.turns(lists.num_blocks[0])
    if limits is None:

        @pl.loop(0, turns)
        def _(turn: jax.Array) -> None:
            take(turn)

        return None

    layout_of_block = block_layout(WARPS, head_dim)
    counter = stats.Counter((BLOCK_TOKENS, head_dim), limits, layout_of_block)

    def take_and_count(turn: jax.Array, tally: stats.Tally) -> stats.Tally:
        first = take(turn) * BLOCK_TOKENS
        # The last rows reach back rather than past the end; those are not new.
        start = jnp.minimum(first, num_tokens - BLOCK_TOKENS)
        window = pl.ds(start, BLOCK_TOKENS)
        rows, slots = share.rows.at[window, share.head], lists.scattered.at[window]
        by_row = layout_of_block.reduce(1)
        x = plgpu.load(rows, layout=layout_of_block, optimized=False)
        slot = plgpu.load(slots, layout=by_row, optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, slot.shape, 0, layout=by_row)
        return counter.count(tally, x, (slot != PAD_SLOT) & (start + row >= first))

    return lax.cond(
        turns > 0,
        lambda: lax.fori_loop(0, turns, take_and_count, counter.nothing).totals(),
        stats.nothing,
    )


def _pad_front(
    k: Rows, v: Rows, plan: AppendPlan, page_size: int
) -> tuple[Rows, Rows, AppendPlan]:
    """Moves all first tokens to 0 or more, for the interpreter alone.

    The interpreter of jax 0.12.0 zero-fills rows past the end as the copy engine does,
    but takes a negative start for an index from the end.
    """
    pad = ((page_size, 0), (0, 0), (0, 0))
    shift = jnp.array([0, page_size, 0, 0], jnp.int32)
    plan = plan._replace(
        page_items=plan.page_items + shift[None, :],
        scattered=jnp.pad(plan.scattered, (page_size, 0)),
        blocks=plan.blocks + page_size // BLOCK_TOKENS,
    )
    return jnp.pad(k, pad), jnp.pad(v, pad), plan
