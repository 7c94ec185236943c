"""The append's page kernel: each program moves 64 columns of one page's rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import FP8_MAX
from pallas_kernels.kv_append import mosaic_gpu_statistics as stats
from pallas_kernels.kv_append.config import TILE_COLUMNS, AppendConfig
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.pages.layout import Rows

_LAYOUT = plgpu.Layout.WGMMA
# Rows of a WGMMA register tile.
_TILE_ROWS = 64


class _Piece(NamedTuple):
    """What fits into registers at once: 64 rows of a tile, and where they come from."""

    rows: Any
    tile: Any
    token_axis: int
    first_row: int


class _Run(NamedTuple):
    """A row of a plan's page items."""

    page: jax.Array
    first_token: jax.Array
    offset: jax.Array
    count: jax.Array

    def covers(self, shape: tuple[int, ...], token_axis: int, first_row: Any) -> Any:
        """Says which values of a block belong to the run's tokens."""
        row = first_row + plgpu.broadcasted_iota(
            jnp.int32, shape, token_axis, layout=_LAYOUT
        )
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
) -> stats.Partials | None:
    """Writes the plan's page items into the pools behind two refs.

    One program per item, head, pool and 64 columns. It loads the rows of a whole
    page, of which those outside the item are masked: a page that the item fills in
    part is read, blended and written back. Rows before the first or past the last
    token of the batch are only loaded, never used; the copy engine fills them with
    zeros. V is turned by transposing loads from shared memory.
    """
    num_items = plan.page_items.shape[0]
    num_kv_heads, page_size, head_dim = k_pages_ref.shape[1:]
    num_columns = head_dim // TILE_COLUMNS
    num_parts = num_items * num_columns
    pool_dtype = k_pages_ref.dtype
    v_tokens = min(page_size, config.v_row_bytes // pool_dtype.itemsize)
    v_tiles = page_size // v_tokens

    def body(*refs: Any) -> None:
        # k, v: [num_tokens, num_kv_heads, head_dim]; items: [num_items, 4]
        rest: Any
        k_gmem, v_gmem, items_gmem, *rest = refs
        inv_scales_gmem, rest = rest[: len(inv_scales)], rest[len(inv_scales) :]
        # pools as in pages/layout.py; then the partials, if asked for
        k_pages_gmem, v_pages_gmem, *rest = rest
        partials_gmem, rest = rest[: 2 * statistics], rest[2 * statistics :]
        # rows: [page_size, 64]; k_tile: [page_size, 64]; v_tile: [v_tiles, 64, v_tokens]
        rows_smem, k_tile_smem, v_tile_smem, rows_barrier, *tile_barriers = rest

        program = lax.axis_index("program")
        item, head, which, column = _unravel(
            program, (num_items, num_kv_heads, 2, num_columns)
        )
        run = _Run(*(items_gmem[item, i] for i in range(4)))
        is_whole = run.count == page_size
        columns = pl.ds(column * TILE_COLUMNS, TILE_COLUMNS)

        def put(amax: jax.Array, counts: tuple[jax.Array, ...]) -> None:
            amax_gmem, counts_gmem = partials_gmem
            part = item * num_columns + column
            amax_gmem[which, head, part] = amax
            for i, n in enumerate(counts):
                counts_gmem[i, which, head, part] = n

        def move(rows_gmem: Any, side: int, pieces: list, copies: list) -> None:
            """Moves one tile; `copies` pairs views of the page with parts of the tile."""
            barrier = tile_barriers[side]
            window = pl.ds(run.first_token, page_size)
            plgpu.copy_gmem_to_smem(
                rows_gmem.at[window, head, columns], rows_smem, rows_barrier
            )

            @pl.when(jnp.logical_not(is_whole))
            def _() -> None:
                for page_gmem, part_smem in copies:
                    plgpu.copy_gmem_to_smem(page_gmem, part_smem, barrier)

            inv_scale = inv_scales_gmem[side][head] if inv_scales else None
            plgpu.barrier_wait(rows_barrier)

            @pl.when(is_whole)
            def _() -> None:
                _fill(pieces, inv_scale, pool_dtype)

            @pl.when(jnp.logical_not(is_whole))
            def _() -> None:
                plgpu.barrier_wait(barrier)
                _fill(pieces, inv_scale, pool_dtype, blend=run)

            plgpu.commit_smem()
            for page_gmem, part_smem in copies:
                plgpu.copy_smem_to_gmem(part_smem, page_gmem)
            if statistics:
                _observe(rows_smem, run, inv_scale, put)
            plgpu.wait_smem_to_gmem(0)

        @pl.when((run.count > 0) & (which == 0))
        def _() -> None:
            pieces = []
            for start in range(0, page_size, _TILE_ROWS):
                cut = pl.ds(start, _TILE_ROWS)
                pieces.append(_Piece(rows_smem.at[cut], k_tile_smem.at[cut], 0, start))
            page_gmem = k_pages_gmem.at[run.page, head, :, columns]
            move(k_gmem, 0, pieces, [(page_gmem, k_tile_smem)])

        @pl.when((run.count > 0) & (which == 1))
        def _() -> None:
            pieces, copies = [], []
            for i in range(v_tiles):
                tokens = pl.ds(i * v_tokens, v_tokens)
                rows = rows_smem.at[tokens].transpose((1, 0))
                pieces.append(_Piece(rows, v_tile_smem.at[i], 1, i * v_tokens))
                page_gmem = v_pages_gmem.at[run.page, head, columns, tokens]
                copies.append((page_gmem, v_tile_smem.at[i]))
            move(v_gmem, 1, pieces, copies)

        if statistics:

            @pl.when(run.count == 0)
            def _() -> None:
                put(jnp.float32(0), (jnp.int32(0),) * stats.NUM_COUNTS)

    def tile_smem(shape: tuple[int, ...], dtype: Any) -> Any:
        swizzle = plgpu.SwizzleTransform(shape[-1] * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(swizzle,))

    items = plan.page_items
    if interpret is not None:
        k, v, items = _pad_front(k, v, items, page_size)
    out_type = stats.partials_shape(num_parts, num_kv_heads) if statistics else ()
    partials = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(
            tile_smem((page_size, TILE_COLUMNS), k.dtype),
            tile_smem((page_size, TILE_COLUMNS), pool_dtype),
            tile_smem((v_tiles, TILE_COLUMNS, v_tokens), pool_dtype),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=v_tiles),
        ),
        grid=(num_items * num_kv_heads * 2 * num_columns,),
        grid_names=("program",),
        kernel_name="kv_append_pages",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(k, v, items, *inv_scales, k_pages_ref, v_pages_ref)
    return stats.Partials(*partials) if statistics else None


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_LAYOUT, optimized=False)


def _fill(
    pieces: list[_Piece], inv_scale: Any, pool_dtype: Any, *, blend: _Run | None = None
) -> None:
    """Writes codes into a tile, with `blend` over what it holds outside that run."""
    for piece in pieces:
        code = _load(piece.rows)
        if inv_scale is not None:
            code = code.astype(jnp.float32) * inv_scale
            # min and max keep NaN here, and the cast does too
            code = jnp.minimum(jnp.maximum(code, -FP8_MAX), FP8_MAX)
        if blend is not None:
            old = _load(piece.tile)
            if inv_scale is not None:
                # E4M3 widens through float16 in hardware; codes come back unchanged
                old = old.astype(jnp.float16).astype(jnp.float32)
            inside = blend.covers(code.shape, piece.token_axis, piece.first_row)
            code = jnp.where(inside, code, old)
        piece.tile[...] = code.astype(pool_dtype)


def _observe(
    rows_smem: Any, run: _Run, inv_scale: Any, put: Callable[..., None]
) -> None:
    """Emits the partials; values are counted one by one only if any counts.

    The loops stay rolled: unrolled they would hold all rows in registers, which
    bounds how many programs an SM holds.
    """
    page_size, dtype = rows_smem.shape[0], rows_smem.dtype
    num_steps = page_size // _TILE_ROWS

    def extremes(i: jax.Array, carry: Any) -> Any:
        size = jnp.abs(_load(rows_smem.at[pl.ds(i * _TILE_ROWS, _TILE_ROWS)]))
        return (
            jnp.minimum(carry[0], jnp.min(size, axis=1)),
            jnp.maximum(carry[1], jnp.max(size, axis=1)),
        )

    def counts(i: jax.Array, carry: Any) -> Any:
        start = i * _TILE_ROWS
        x = _load(rows_smem.at[pl.ds(start, _TILE_ROWS)]).astype(jnp.float32)
        inside = run.covers(x.shape, 0, start)
        size, code = stats.value_statistics(x, x * inv_scale, inside)
        amax = jnp.maximum(carry[0], jnp.max(size, axis=1))
        return amax, carry[1] + jnp.sum(code, axis=1)

    def count_all() -> None:
        start = _column(0, jnp.float32), _column(0, jnp.int32)
        amax, packed = lax.fori_loop(0, num_steps, counts, start)
        put(jnp.max(amax), tuple(jnp.sum(n) for n in stats.unpack_counts(packed)))

    @pl.when(run.count == page_size)
    def _() -> None:
        start = _column(jnp.inf, dtype), _column(0, dtype)
        low, high = lax.fori_loop(0, num_steps, extremes, start)
        smallest = jnp.min(low.astype(jnp.float32))
        largest = jnp.max(high.astype(jnp.float32))
        quiet = stats.nothing_counts(smallest, largest, inv_scale)
        pl.when(quiet)(lambda: put(largest, (jnp.int32(0),) * stats.NUM_COUNTS))
        pl.when(jnp.logical_not(quiet))(count_all)

    pl.when(run.count < page_size)(count_all)


def _pad_front(
    k: Rows, v: Rows, items: Int[Array, "num_items 4"], page_size: int
) -> tuple[Rows, Rows, Int[Array, "num_items 4"]]:
    """Moves all first tokens to 0 or more, for the interpreter alone.

    The interpreter of jax 0.12.0 zero-fills rows past the end as the copy engine does,
    but takes a negative start for an index from the end.
    """
    pad = ((page_size, 0), (0, 0), (0, 0))
    shift = jnp.array([0, page_size, 0, 0], jnp.int32)
    return jnp.pad(k, pad), jnp.pad(v, pad), items + shift[None, :]


def _unravel(index: jax.Array, sizes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Splits a program's index into its coordinates, the last one fastest."""
    coordinates = []
    for size in reversed(sizes[1:]):
        coordinates.append(lax.rem(index, jnp.int32(size)))
        index = lax.div(index, jnp.int32(size))
    return index, *reversed(coordinates)


def _column(value: float, dtype: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((_TILE_ROWS,), value, dtype), _LAYOUT.reduce(1))
