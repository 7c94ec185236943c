"""The append of a long batch: programs move pieces of pages, then the rest."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped

from pallas_kernels.kv_append import mosaic_gpu_statistics as stats
from pallas_kernels.kv_append.config import BLOCK_TOKENS, PIECE, AppendConfig
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
    """Scratch for the pieces in flight. A piece is blended in place; V's is turned."""

    rows: Any  # [num_stages, PIECE tokens, PIECE columns] of the rows' dtype
    tile: Any  # [num_stages, PIECE, PIECE] of the pool's dtype
    rows_barrier: Any  # [num_stages]
    tile_barrier: Any  # [num_stages]


class _Side(NamedTuple):
    """One head of K (`token_axis` 0) or of V (1): where its rows come from and go."""

    token_axis: int
    rows: Any  # [num_tokens, num_kv_heads, head_dim]
    pages: Any  # as in pages/layout.py
    head: Any  # its index, or a slice of one

    def place(self, page: jax.Array, tokens: Any, columns: Any) -> Any:
        """Views the place of some tokens' columns in a page."""
        if self.token_axis == 0:
            return self.pages.at[page, self.head, tokens, columns]
        return self.pages.at[page, self.head, columns, tokens]


class _Share(NamedTuple):
    """What one program serves: some of the pieces of one head of K or of V."""

    sides: tuple[_Side, _Side]
    is_value: jax.Array
    inv_scale: jax.Array | None
    part: jax.Array
    num_parts: int

    def turns(self, count: jax.Array) -> jax.Array:
        """Counts `part`, `part + num_parts`, ... below `count`."""
        return lax.div(count - self.part + (self.num_parts - 1), self.num_parts)

    def on_its_side(self, do: Callable[[_Side], None]) -> None:
        """Does what differs between K and V, once for the one that it serves."""
        pl.when(jnp.logical_not(self.is_value))(lambda: do(self.sides[0]))
        pl.when(self.is_value)(lambda: do(self.sides[1]))


class _Piece(NamedTuple):
    """PIECE tokens and columns of a page, and the part of them that an item covers."""

    page: jax.Array
    tokens: Any  # of the page
    columns: Any
    first_token: jax.Array  # of the batch, in row 0 of the piece
    start: jax.Array  # rows from here on, if not negative
    stop: jax.Array

    def covers(self, row: jax.Array) -> jax.Array:
        """Says which rows of the piece belong to the item's tokens."""
        return (row >= self.start) & (row < self.stop)

    @property
    def is_touched(self) -> jax.Array:
        return (self.start < PIECE) & (self.stop > 0)

    @property
    def is_whole(self) -> jax.Array:
        return (self.start <= 0) & (self.stop >= PIECE)


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
) -> Sequence[Shaped[Array, "num_kv_heads num_parts"]]:
    """Writes a plan's page items and scattered tokens into the pools behind two refs.

    Programs take turns at the pieces of one head of K or of V, then at its scattered
    rows. A piece is 64 tokens by 64 columns of an item's page; what the item covers
    in part is read, blended and written back. Rows before the first or past the last
    token of the batch are only loaded, never used; the copy engine fills them with
    zeros. V is turned by transposing loads from shared memory.

    Returns:
      what `statistics.merge` takes, if asked for.

    Raises:
      NotImplementedError: if statistics are asked for of too many tokens.
    """
    num_kv_heads, page_size, _ = k_pages_ref.shape[1:]
    num_groups, stages = 2 * num_kv_heads, config.num_stages
    num_parts = max(1, config.num_programs // num_groups)
    if statistics:
        _check_tallies_hold(k, page_size, num_parts)
    if interpret is not None:
        k, v, plan = _pad_front(k, v, plan, page_size)

    tiles = [_swizzled(stages, dtype) for dtype in (k.dtype, k_pages_ref.dtype)]
    barrier = plgpu.Barrier(num_barriers=stages)
    out_type = stats.both_shape(num_kv_heads, num_parts) if statistics else ()
    body = functools.partial(
        _kernel,
        num_parts=num_parts,
        whole_pages=config.whole_pages,
        statistics=statistics,
    )
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(*tiles, barrier, barrier),
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


def _swizzled(stages: int, dtype: Any) -> Any:
    swizzle = plgpu.SwizzleTransform(PIECE * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((stages, PIECE, PIECE), dtype, transforms=(swizzle,))


def _check_tallies_hold(k: Rows, page_size: int, num_parts: int) -> None:
    num_tokens, _, head_dim = k.shape
    # No item is shorter than a block.
    pieces = pl.cdiv(num_tokens, BLOCK_TOKENS) * page_size * head_dim // PIECE**2
    values = pl.cdiv(pieces, num_parts) * PIECE // _TALLY_COLUMNS
    if values > stats.MOST_VALUES:
        raise NotImplementedError(
            f"Mosaic's kv_append counts at most {stats.MOST_VALUES} values in one "
            f"entry of a tally, {num_tokens=} may give it {values}: append them in "
            "several calls."
        )


def _kernel(
    k_gmem: Any,
    v_gmem: Any,
    *refs: Any,
    num_parts: int,
    whole_pages: bool,
    statistics: bool,
) -> None:
    # the lists; inverse scales if the pools are FP8; pools; partials if asked for;
    # scratch
    lists, middle, ring = _Lists(*refs[:5]), refs[5:-4], _Ring(*refs[-4:])
    first_partial = len(middle) - 8 * statistics
    *inv_scales_gmem, k_pages_gmem, v_pages_gmem = middle[:first_partial]
    num_kv_heads = jnp.int32(k_gmem.shape[1])
    program = lax.axis_index("program")
    part, group = lax.div(program, 2 * num_kv_heads), lax.rem(program, 2 * num_kv_heads)
    side, head = lax.div(group, num_kv_heads), lax.rem(group, num_kv_heads)
    inv_scale = limits = None
    if inv_scales_gmem:
        of_k, of_v = (x[head] for x in inv_scales_gmem)
        inv_scale = jnp.where(side == 0, of_k, of_v)
        limits = stats.find_limits(inv_scale) if statistics else None
    sides = (_Side(0, k_gmem, k_pages_gmem, head), _Side(1, v_gmem, v_pages_gmem, head))
    share = _Share(sides, side == 1, inv_scale, part, num_parts)
    # Now, because nothing hides the time that it takes once the items are done.
    num_blocks = lists.num_blocks[0]
    totals = _append_items(share, lists, ring, limits, whole_pages=whole_pages)
    others = _append_scattered(share, lists, num_blocks, limits)
    if totals is not None and others is not None:
        both_gmem = middle[first_partial:]

        def store(side: _Side) -> None:
            refs = both_gmem[4 * side.token_axis : 4 * side.token_axis + 4]
            stats.store(refs, (head, part), totals.join(others))

        share.on_its_side(store)


def _append_items(
    share: _Share,
    lists: _Lists,
    ring: _Ring,
    limits: stats.Limits | None,
    *,
    whole_pages: bool,
) -> stats.Totals | None:
    """Moves this program's pieces through a ring that refills itself.

    With limits they are counted, too, while their codes leave.
    """
    stages = ring.rows.shape[0]
    # A stage is free once its tile has been read: with several that of the turn
    # before, with one this turn's.
    lag = min(1, stages - 1)
    num_columns, per_item = _pieces_per_item(share.sides[0])
    in_a_row = per_item if whole_pages else jnp.int32(1)
    turns = share.turns(lax.div(lists.num_items[0] * per_item, in_a_row)) * in_a_row
    counter = None
    if limits is not None:
        counter = stats.Counter((PIECE, _TALLY_COLUMNS), limits, _LAYOUT)

    def find(turn: jax.Array) -> _Piece:
        row = share.part + lax.div(turn, in_a_row) * share.num_parts
        index = row * in_a_row + lax.rem(turn, in_a_row)
        # Past the last item there is nothing to find, but room to look.
        item = jnp.minimum(lax.div(index, per_item), lists.page_items.shape[0] - 1)
        rest = lax.rem(index, per_item)
        page, first_token, offset, count = (lists.page_items[item, i] for i in range(4))
        tokens = lax.div(rest, num_columns) * PIECE
        columns = pl.ds(lax.rem(rest, num_columns) * PIECE, PIECE)
        start = offset - tokens
        return _Piece(
            page,
            pl.ds(tokens, PIECE),
            columns,
            first_token + tokens,
            start,
            start + count,
        )

    def start(turn: jax.Array, piece: _Piece) -> None:
        """Copies a piece's rows, and what its page holds if that is to blend."""
        stage = lax.rem(turn, jnp.int32(stages))
        window = pl.ds(piece.first_token, PIECE)

        def copy(side: _Side) -> None:
            rows = side.rows.at[window, side.head, piece.columns]
            plgpu.copy_gmem_to_smem(
                rows, ring.rows.at[stage], ring.rows_barrier.at[stage]
            )

            @pl.when(jnp.logical_not(piece.is_whole))
            def _() -> None:
                place = side.place(piece.page, piece.tokens, piece.columns)
                plgpu.copy_gmem_to_smem(
                    place, ring.tile.at[stage], ring.tile_barrier.at[stage]
                )

        pl.when((turn < turns) & piece.is_touched)(lambda: share.on_its_side(copy))

    def take(turn: jax.Array, tally: stats.Tally | None) -> stats.Tally | None:
        # Both are looked up before anything waits.
        piece, next_piece = find(turn), find(turn + stages - lag)
        stage = lax.rem(turn, jnp.int32(stages))
        rows, tile = ring.rows.at[stage], ring.tile.at[stage]

        def move(side: _Side) -> None:
            fill = functools.partial(_fill, side, share.inv_scale, rows, tile)
            pl.when(piece.is_whole)(fill)

            @pl.when(jnp.logical_not(piece.is_whole))
            def _() -> None:
                plgpu.barrier_wait(ring.tile_barrier.at[stage])
                fill(blend=piece)

            plgpu.commit_smem()
            place = side.place(piece.page, piece.tokens, piece.columns)
            plgpu.copy_smem_to_gmem(tile, place, commit_group=False)

        @pl.when(piece.is_touched)
        def _() -> None:
            plgpu.barrier_wait(ring.rows_barrier.at[stage])
            share.on_its_side(move)

        # A group even of nothing, so that groups count turns.
        plgpu.commit_smem_to_gmem_group()
        if counter is not None and tally is not None:
            row = plgpu.broadcasted_iota(
                jnp.int32, (PIECE,), 0, layout=_LAYOUT.reduce(1)
            )
            tally = counter.count(tally, _load(rows), piece.covers(row))
        plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
        pl.when(turn >= lag)(lambda: start(turn + stages - lag, next_piece))
        return tally

    first_turns = [jnp.int32(turn) for turn in range(stages)]
    for turn, piece in [(turn, find(turn)) for turn in first_turns]:
        start(turn, piece)
    tally = lax.fori_loop(0, turns, take, None if counter is None else counter.nothing)
    plgpu.wait_smem_to_gmem(0)
    return None if tally is None else tally.totals()


def _pieces_per_item(side: _Side) -> tuple[jax.Array, jax.Array]:
    """Counts the pieces across an item's columns, and all of them."""
    page_size, head_dim = side.pages.shape[2:]
    return jnp.int32(head_dim // PIECE), jnp.int32(page_size * head_dim // PIECE**2)


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_LAYOUT, optimized=False)


def _fill(
    side: _Side,
    inv_scale: jax.Array | None,
    rows: Any,
    tile: Any,
    *,
    blend: _Piece | None = None,
) -> None:
    """Writes codes into a tile, with `blend` over what it holds outside that piece."""
    x = _load(rows.transpose((1, 0)) if side.token_axis == 1 else rows)
    code = scale_and_clip(x, inv_scale).astype(tile.dtype)
    tile[...] = code if blend is None else _blend(code, _load(tile), blend, side)


def _blend(code: jax.Array, old: jax.Array, piece: _Piece, side: _Side) -> jax.Array:
    """Takes `code` where the piece covers, `old` elsewhere."""
    # Registers of 8 bits can't be selected among. Float16 holds every code, and half as
    # many registers as float32, of which an SM has enough for one program less.
    wide = jnp.float16 if code.dtype.itemsize == 1 else code.dtype
    row = plgpu.broadcasted_iota(jnp.int32, code.shape, side.token_axis, layout=_LAYOUT)
    blended = jnp.where(piece.covers(row), code.astype(wide), old.astype(wide))
    # No conversion leads from float16 to E4M3.
    return blended.astype(jnp.float32).astype(code.dtype)


def _append_scattered(
    share: _Share, lists: _Lists, num_blocks: jax.Array, limits: stats.Limits | None
) -> stats.Totals | None:
    """Writes the tokens outside all items, row by row, for this program's blocks."""
    num_tokens, _, head_dim = share.sides[0].rows.shape
    page_size = jnp.int32(share.sides[0].pages.shape[2])
    layout = row_layout(head_dim)

    def load(side: _Side, block: jax.Array, i: Any) -> tuple[jax.Array, jax.Array]:
        token = block * BLOCK_TOKENS + i
        inside = jnp.minimum(token, num_tokens - 1)
        slot = jnp.where(token < num_tokens, lists.scattered[inside], PAD_SLOT)
        row = side.rows.at[inside, side.head]
        return slot, plgpu.load(row, layout=layout, optimized=False)

    def write(side: _Side, slot: jax.Array, x: jax.Array) -> None:
        page, token = lax.div(slot, page_size), lax.rem(slot, page_size)
        place = side.place(page, token, slice(None))
        code = scale_and_clip(x, share.inv_scale).astype(side.pages.dtype)
        pl.when(slot >= 0)(lambda: store_narrow(place, code))

    def take(turn: jax.Array) -> jax.Array:
        block = lists.blocks[share.part + turn * share.num_parts]

        def move(side: _Side) -> None:
            # All loads before the first store: their latencies overlap.
            row = side._replace(head=pl.ds(side.head, 1))
            for slot, x in [load(row, block, i) for i in range(BLOCK_TOKENS)]:
                write(row, slot, x)

        share.on_its_side(move)
        return block

    turns = share.turns(num_blocks)
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

        def load_rows(side: _Side) -> jax.Array:
            rows = side.rows.at[window, side.head]
            return plgpu.load(rows, layout=layout_of_block, optimized=False)

        k_side, v_side = share.sides
        x = lax.cond(
            share.is_value, lambda: load_rows(v_side), lambda: load_rows(k_side)
        )
        by_row = layout_of_block.reduce(1)
        slot = plgpu.load(lists.scattered.at[window], layout=by_row, optimized=False)
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
