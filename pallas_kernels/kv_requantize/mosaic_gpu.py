"""Requantization on Hopper: tiles by TMA, V transposed through `ldmatrix.trans`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp8 import FP8_DTYPE, FP8_MAX
from pallas_kernels.kv_requantize.config import (
    SUPPORTED_HEAD_DIMS,
    SUPPORTED_PAGE_SIZES,
    TILE_DIMS,
    RequantizeConfig,
    heuristic_config,
)
from pallas_kernels.kv_requantize.plan import NO_RUN, RequantizePlan
from pallas_kernels.pages.layout import (
    KPages,
    PageGeometry,
    Rows,
    VPages,
    page_geometry,
)

WGMMA = plgpu.Layout.WGMMA
PIECE_TOKENS = 64  # a warpgroup's tile is 64 rows; of V, dims, so both sides are 64
OWNERS_AHEAD = 8  # looked up together where rows come one by one
RUN_CODES = 4096  # 32 codes a thread; the smallest tile of a head, 64 x 64, is one run


def requantize_staged(
    k_pages: KPages,
    v_pages: VPages,
    staged_k: Rows,
    staged_v: Rows,
    slot_owner: Int[Array, "num_slots"],
    plan: RequantizePlan,
    *,
    k_inv_scale: Float[Array, "num_kv_heads"],
    v_inv_scale: Float[Array, "num_kv_heads"],
    config: RequantizeConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[KPages, VPages]:
    """Walks the plan's pages with persistent programs; the count is read on the device.

    Raises:
      NotImplementedError: for a page size or head_dim without a tile.
    """
    geometry = page_geometry(k_pages, v_pages)
    _check_served(geometry, k_pages.dtype)
    config = config or heuristic_config(geometry.page_size)
    page_size = geometry.page_size
    # The interpreter of jax 0.12.0 takes a negative start for an index from the end.
    padding = 0 if interpret is None else page_size
    pad = ((padding, 0), (0, 0), (0, 0))
    body = functools.partial(
        _staged_kernel, num_programs=config.num_programs, padding=padding
    )
    num_pieces = page_size // PIECE_TOKENS
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            _swizzled((page_size, TILE_DIMS), jnp.bfloat16),
            _swizzled((num_pieces, PIECE_TOKENS, TILE_DIMS), FP8_DTYPE),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=page_size),
            plgpu.Barrier(num_arrivals=num_pieces),
        ],
        grid=(config.num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="kv_requantize_staged",
        interpret=interpret,
    )(
        jnp.pad(staged_k, pad),
        jnp.pad(staged_v, pad),
        slot_owner.reshape(-1, page_size),
        plan.pages,
        plan.first_rows,
        plan.count.reshape(1),
        k_inv_scale,
        v_inv_scale,
        k_ref,
        v_ref,
    )
    return k_ref[...], v_ref[...]


def _staged_kernel(
    staged_k_gmem: Any,  # bf16 [num_rows, num_kv_heads, head_dim]
    staged_v_gmem: Any,  # bf16 [num_rows, num_kv_heads, head_dim]
    owner_gmem: Any,  # i32 [num_pages, page_size]
    pages_gmem: Any,  # i32 [num_pages]
    first_rows_gmem: Any,  # i32 [num_pages]
    count_gmem: Any,  # i32 [1]
    k_inv_scale_gmem: Any,  # f32 [num_kv_heads]
    v_inv_scale_gmem: Any,  # f32 [num_kv_heads]
    k_pages_gmem: Any,  # fp8 [num_pages, num_kv_heads, page_size, head_dim]
    v_pages_gmem: Any,  # fp8 [num_pages, num_kv_heads, head_dim, page_size]
    rows_smem: Any,  # bf16 [page_size, TILE_DIMS]
    codes_smem: Any,  # fp8 [page_size / 64, 64, 64], K tokens by dims, V the other
    bulk_barrier: Any,
    row_barrier: Any,
    old_barrier: Any,
    *,
    num_programs: int,
    padding: int,
) -> None:
    _, num_kv_heads, head_dim = staged_k_gmem.shape
    page_size = owner_gmem.shape[1]
    tiles_per_head = head_dim // TILE_DIMS
    items_per_page = 2 * num_kv_heads * tiles_per_head
    program = lax.axis_index("program")
    starts = range(0, page_size, PIECE_TOKENS)
    pieces = [pl.ds(start, PIECE_TOKENS) for start in starts]

    def load_rows(staged_gmem, page, first_row, head, dims) -> None:
        bulk = first_row != NO_RUN

        @pl.when(bulk)
        def _():
            # Rows before the first or past the last are not owned; the copy engine
            # fills them with zeros.
            window = pl.ds(first_row + padding, page_size)
            source = staged_gmem.at[window, head, dims]
            plgpu.copy_gmem_to_smem(source, rows_smem, bulk_barrier)
            plgpu.barrier_wait(bulk_barrier)

        @pl.when(jnp.logical_not(bulk))
        def _():
            @pl.loop(0, page_size // OWNERS_AHEAD)
            def _(group):
                start = group * OWNERS_AHEAD
                # All owners before the first copy: their latencies overlap.
                owners = [owner_gmem[page, start + i] for i in range(OWNERS_AHEAD)]
                for i, owner in enumerate(owners):
                    load_row(staged_gmem, owner, start + i, head, dims)

            plgpu.barrier_wait(row_barrier)

    def load_row(staged_gmem, owner, offset, head, dims) -> None:
        @pl.when(owner >= 0)
        def _():
            source = staged_gmem.at[pl.ds(owner + padding, 1), head, dims]
            target = rows_smem.at[pl.ds(offset, 1)]
            plgpu.copy_gmem_to_smem(source, target, row_barrier)

        @pl.when(owner < 0)
        def _():
            plgpu.barrier_arrive(row_barrier)

    def rewrite(staged_gmem, inv_scale_gmem, tile, where, *, token_axis: int) -> None:
        page, _, head, _ = where
        for piece, tokens in enumerate(pieces):
            plgpu.copy_gmem_to_smem(tile(tokens), codes_smem.at[piece], old_barrier)
        inv_scale = inv_scale_gmem[head]
        owners = [
            _load_owners(owner_gmem.at[page, tokens], token_axis) for tokens in pieces
        ]
        load_rows(staged_gmem, *where)
        plgpu.barrier_wait(old_barrier)
        for piece, tokens in enumerate(pieces):
            rows = rows_smem.at[tokens]
            # V's codes stand dims by tokens: its rows are read by `ldmatrix.trans`.
            source = rows.transpose((1, 0)) if token_axis == 1 else rows
            _blend(source, codes_smem.at[piece], owners[piece], inv_scale, token_axis)
        plgpu.commit_smem()
        for piece, tokens in enumerate(pieces):
            plgpu.copy_smem_to_gmem(codes_smem.at[piece], tile(tokens))
        # Read is enough: what follows only needs the tiles back.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    num_items = count_gmem[0] * items_per_page
    num_turns = lax.div(num_items - program + num_programs - 1, num_programs)

    @pl.loop(0, num_turns)
    def _(turn):
        item = program + turn * num_programs
        index = lax.div(item, items_per_page)
        rest = lax.rem(item, items_per_page)
        of_values = lax.rem(rest, 2)
        head = lax.div(rest, 2 * tiles_per_head)
        dims = pl.ds(lax.rem(lax.div(rest, 2), tiles_per_head) * TILE_DIMS, TILE_DIMS)
        page = pages_gmem[index]
        where = (page, first_rows_gmem[index], head, dims)

        @pl.when(of_values == 0)
        def _():
            def tile(tokens):
                return k_pages_gmem.at[page, head, tokens, dims]

            rewrite(staged_k_gmem, k_inv_scale_gmem, tile, where, token_axis=0)

        @pl.when(of_values == 1)
        def _():
            def tile(tokens):
                return v_pages_gmem.at[page, head, dims, tokens]

            rewrite(staged_v_gmem, v_inv_scale_gmem, tile, where, token_axis=1)


def _load_owners(owners_gmem: Any, token_axis: int) -> Array:
    layout = WGMMA.reduce(1 - token_axis)
    return plgpu.load(owners_gmem, layout=layout, optimized=False)


def _blend(
    source: Any, target: Any, owners: Array, inv_scale: Array, token_axis: int
) -> None:
    """Writes the codes of owned rows over the old ones of a tile."""
    x = plgpu.load(source, layout=WGMMA, optimized=False).astype(jnp.float32)
    y = _clip(x * inv_scale)
    owned = lax.broadcast_in_dim(owners, x.shape, (token_axis,)) >= 0
    # Registers of 8 bits cannot be selected among: the old codes take the way
    # through float32, which gives every one of them back.
    old = plgpu.load(target, layout=WGMMA, optimized=False)
    old = old.astype(jnp.float16).astype(jnp.float32)
    target[...] = jnp.where(owned, y, old).astype(FP8_DTYPE)


def requantize_pages(
    k_pages: KPages,
    v_pages: VPages,
    page_mask: Bool[Array, "num_pages"] | None,
    *,
    k_scale: Float[Array, "num_kv_heads"],
    v_scale: Float[Array, "num_kv_heads"],
    k_inv_scale: Float[Array, "num_kv_heads"],
    v_inv_scale: Float[Array, "num_kv_heads"],
    config: RequantizeConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[KPages, VPages]:
    """Streams codes through registers: a head's page is one run of bytes to it.

    Raises:
      NotImplementedError: for a page size or head_dim without a tile.
    """
    geometry = page_geometry(k_pages, v_pages)
    _check_served(geometry, k_pages.dtype)
    config = config or heuristic_config(geometry.page_size)
    if page_mask is None:
        page_mask = jnp.ones((geometry.num_pages,), jnp.bool)
    runs = (geometry.num_pages, geometry.num_kv_heads, -1)
    k_ref = jax.new_ref(k_pages.reshape(runs))
    v_ref = jax.new_ref(v_pages.reshape(runs))
    plgpu.kernel(
        functools.partial(_rescale_kernel, num_programs=config.num_programs),
        out_type=(),
        grid=(config.num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="kv_requantize_pages",
        interpret=interpret,
    )(
        page_mask.astype(jnp.int32),
        *(k_scale, v_scale, k_inv_scale, v_inv_scale),
        *(k_ref, v_ref),
    )
    return k_ref[...].reshape(k_pages.shape), v_ref[...].reshape(v_pages.shape)


def _rescale_kernel(
    mask_gmem: Any,  # i32 [num_pages]
    k_scale_gmem: Any,  # f32 [num_kv_heads]
    v_scale_gmem: Any,  # f32 [num_kv_heads]
    k_inv_scale_gmem: Any,  # f32 [num_kv_heads]
    v_inv_scale_gmem: Any,  # f32 [num_kv_heads]
    k_pages_gmem: Any,  # fp8 [num_pages, num_kv_heads, page_size * head_dim]
    v_pages_gmem: Any,  # fp8 [num_pages, num_kv_heads, head_dim * page_size]
    *,
    num_programs: int,
) -> None:
    num_pages, num_kv_heads, run = k_pages_gmem.shape
    layout = plgpu.Layout.WG_STRIDED((RUN_CODES,), vec_size=16)
    runs_per_head = run // RUN_CODES
    num_items = num_pages * num_kv_heads * runs_per_head
    program = lax.axis_index("program")

    def rescaled(codes: Array, scale: Array, inv_scale: Array) -> Array:
        x = codes.astype(jnp.float16).astype(jnp.float32) * scale
        return _clip(x * inv_scale).astype(FP8_DTYPE)

    @pl.loop(0, lax.div(num_items - program + num_programs - 1, num_programs))
    def _(turn):
        item = program + turn * num_programs
        page = lax.div(item, num_kv_heads * runs_per_head)
        rest = lax.rem(item, num_kv_heads * runs_per_head)
        head = lax.div(rest, runs_per_head)
        codes = pl.ds(lax.rem(rest, runs_per_head) * RUN_CODES, RUN_CODES)

        @pl.when(mask_gmem[page] != 0)
        def _():
            k_run = k_pages_gmem.at[page, head, codes]
            v_run = v_pages_gmem.at[page, head, codes]
            # Both loads before either store: more bytes in flight for a program.
            k = plgpu.load(k_run, layout=layout, optimized=False)
            v = plgpu.load(v_run, layout=layout, optimized=False)
            k_run[...] = rescaled(k, k_scale_gmem[head], k_inv_scale_gmem[head])
            v_run[...] = rescaled(v, v_scale_gmem[head], v_inv_scale_gmem[head])


def _clip(y: Array) -> Array:
    # Mosaic's minimum and maximum propagate NaN, as the shared quantizer asks.
    return jnp.minimum(jnp.maximum(y, -FP8_MAX), FP8_MAX)


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    swizzle = plgpu.SwizzleTransform(shape[-1] * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(swizzle,))


def _check_served(geometry: PageGeometry, dtype: jnp.dtype) -> None:
    if dtype != FP8_DTYPE:
        raise NotImplementedError(
            f"Mosaic requantization serves float8_e4m3fn pools, got {dtype}."
        )
    if geometry.page_size not in SUPPORTED_PAGE_SIZES:
        raise NotImplementedError(
            f"Mosaic requantization has tiles for {SUPPORTED_PAGE_SIZES} tokens, got "
            f"page_size={geometry.page_size}."
        )
    if geometry.head_dim not in SUPPORTED_HEAD_DIMS:
        raise NotImplementedError(
            f"Mosaic requantization has tiles for {SUPPORTED_HEAD_DIMS} dims, got "
            f"head_dim={geometry.head_dim}."
        )
