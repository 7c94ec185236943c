"""Pages on Hopper: copies by TMA alone, V turned token-major through `ldmatrix.trans`.

Both ops give one program a head of one page, K and V.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.pages.config import (
    SUPPORTED_HEAD_DIMS,
    SUPPORTED_PAGE_SIZES,
    TILE,
    PageTileConfig,
    heuristic_config,
)
from pallas_kernels.pages.layout import (
    KPages,
    PageGeometry,
    VPages,
    page_geometry,
)
from pallas_kernels.pages.reference import Dense

WGMMA = plgpu.Layout.WGMMA
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
# A copy does not care for a tile's shape, and a TMA box has at most 256 rows: rows of
# 128 elements make 256 of the largest tile, 128 x 256.
COPY_ROW = 128


def copy_pages(
    k_pages: KPages,
    v_pages: VPages,
    sources: Int[Array, "num_copies"],
    destinations: Int[Array, "num_copies"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[KPages, VPages]:
    """Moves each page through shared memory, untouched by a register.

    Raises:
      NotImplementedError: for a dtype, page size or head_dim without a tile.
    """
    geometry = page_geometry(k_pages, v_pages)
    _check_served(geometry, k_pages.dtype)
    rows = geometry.page_size * geometry.head_dim // COPY_ROW
    tiles = (geometry.num_pages, geometry.num_kv_heads, rows, COPY_ROW)
    k_ref = jax.new_ref(k_pages.reshape(tiles))
    v_ref = jax.new_ref(v_pages.reshape(tiles))
    plgpu.kernel(
        _copy_kernel,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((rows, COPY_ROW), k_pages.dtype),
            plgpu.SMEM((rows, COPY_ROW), v_pages.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(sources.shape[0], geometry.num_kv_heads),
        grid_names=("copy", "head"),
        compiler_params=WARPGROUP,
        kernel_name="pages_copy",
        interpret=interpret,
    )(sources, destinations, k_ref, v_ref)
    return k_ref[...].reshape(k_pages.shape), v_ref[...].reshape(v_pages.shape)


def _copy_kernel(
    sources_gmem: Any,  # i32 [num_copies]
    destinations_gmem: Any,  # i32 [num_copies]
    k_pages_gmem: Any,  # [num_pages, num_kv_heads, rows, COPY_ROW]
    v_pages_gmem: Any,  # [num_pages, num_kv_heads, rows, COPY_ROW]
    k_smem: Any,  # [rows, COPY_ROW]
    v_smem: Any,  # [rows, COPY_ROW]
    barrier: Any,
) -> None:
    copy, head = lax.axis_index("copy"), lax.axis_index("head")
    source, destination = sources_gmem[copy], destinations_gmem[copy]

    @pl.when((source >= 0) & (destination >= 0))
    def _():
        plgpu.copy_gmem_to_smem(k_pages_gmem.at[source, head], k_smem, barrier)
        plgpu.copy_gmem_to_smem(v_pages_gmem.at[source, head], v_smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(k_smem, k_pages_gmem.at[destination, head])
        plgpu.copy_smem_to_gmem(v_smem, v_pages_gmem.at[destination, head])
        plgpu.wait_smem_to_gmem(0)


def gather_sequences(
    k_pages: KPages,
    v_pages: VPages,
    block_table: Int[Array, "num_seqs pages_per_seq"],
    *,
    config: PageTileConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Dense, Dense]:
    """Copies K by TMA and turns V in tiles of 64 x 64.

    Raises:
      NotImplementedError: for a dtype, page size or head_dim without a tile.
    """
    geometry = page_geometry(k_pages, v_pages)
    _check_served(geometry, k_pages.dtype)
    num_seqs, pages_per_seq = block_table.shape
    _, num_kv_heads, page_size, head_dim = geometry
    dtype = k_pages.dtype
    rows = jax.ShapeDtypeStruct(
        (num_seqs * pages_per_seq, page_size, num_kv_heads, head_dim), dtype
    )
    config = config or heuristic_config(page_size, head_dim, dtype.itemsize)
    tiles = (config.tiles_of_dims, config.tiles_of_tokens)
    widened = [_swizzled((2, TILE, TILE), jnp.float16)] if config.widens else []
    k, v = plgpu.kernel(
        _gather_kernel,
        out_type=(rows, rows),
        scratch_types=[
            plgpu.SMEM((page_size, head_dim), dtype),
            _swizzled((*tiles, TILE, TILE), dtype),
            _swizzled((config.tiles_of_dims, page_size, TILE), dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=math.prod(tiles)),
            *widened,
        ],
        grid=(num_seqs * pages_per_seq, num_kv_heads),
        grid_names=("page", "head"),
        compiler_params=WARPGROUP,
        kernel_name="pages_gather",
        interpret=interpret,
    )(block_table.reshape(-1), k_pages, v_pages)
    dense = (num_seqs, pages_per_seq * page_size, num_kv_heads, head_dim)
    return k.reshape(dense), v.reshape(dense)


def _gather_kernel(
    table_gmem: Any,  # i32 [num_seqs * pages_per_seq]
    k_pages_gmem: Any,  # [num_pages, num_kv_heads, page_size, head_dim]
    v_pages_gmem: Any,  # [num_pages, num_kv_heads, head_dim, page_size]
    k_gmem: Any,  # [num_seqs * pages_per_seq, page_size, num_kv_heads, head_dim]
    v_gmem: Any,  # [num_seqs * pages_per_seq, page_size, num_kv_heads, head_dim]
    k_smem: Any,  # [page_size, head_dim]
    stored_smem: Any,  # [head_dim / TILE, page_size / TILE, TILE dims, TILE tokens]
    turned_smem: Any,  # [head_dim / TILE, page_size tokens, TILE dims]
    k_barrier: Any,
    v_barrier: Any,
    widened_smem: Any = None,  # f16 [2, TILE dims, TILE tokens], for 8-bit codes
) -> None:
    index, head = lax.axis_index("page"), lax.axis_index("head")
    page = jnp.clip(table_gmem[index], 0, k_pages_gmem.shape[0] - 1)
    tiles = [
        (dims, tokens)
        for dims in range(stored_smem.shape[0])
        for tokens in range(stored_smem.shape[1])
    ]

    def turn(dims: int, tokens: int, buffer: int) -> None:
        stored = stored_smem.at[dims, tokens]
        turned = turned_smem.at[dims, pl.ds(tokens * TILE, TILE)]
        if widened_smem is None:
            turned[...] = plgpu.load(
                stored.transpose((1, 0)), layout=WGMMA, optimized=False
            )
            return
        # Only 16-bit elements can be transposed on their way to registers. Two
        # buffers: the barrier of one tile keeps the next but one from overtaking.
        widened = widened_smem.at[buffer]
        codes = plgpu.load(stored, layout=WGMMA, optimized=False)
        widened[...] = codes.astype(jnp.float16)
        plgpu.commit_smem()
        x = plgpu.load(widened.transpose((1, 0)), layout=WGMMA, optimized=False)
        turned[...] = x.astype(jnp.float32).astype(FP8_DTYPE)

    plgpu.copy_gmem_to_smem(k_pages_gmem.at[page, head], k_smem, k_barrier)
    for dims, tokens in tiles:
        rows, columns = pl.ds(dims * TILE, TILE), pl.ds(tokens * TILE, TILE)
        tile_gmem = v_pages_gmem.at[page, head, rows, columns]
        plgpu.copy_gmem_to_smem(tile_gmem, stored_smem.at[dims, tokens], v_barrier)
    plgpu.barrier_wait(k_barrier)
    plgpu.copy_smem_to_gmem(k_smem, k_gmem.at[index, :, head])
    plgpu.barrier_wait(v_barrier)
    for i, (dims, tokens) in enumerate(tiles):
        turn(dims, tokens, i % 2)
    plgpu.commit_smem()
    for dims in range(turned_smem.shape[0]):
        columns = pl.ds(dims * TILE, TILE)
        plgpu.copy_smem_to_gmem(
            turned_smem.at[dims], v_gmem.at[index, :, head, columns]
        )
    plgpu.wait_smem_to_gmem(0)


def _swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    swizzle = plgpu.SwizzleTransform(shape[-1] * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(swizzle,))


def _check_served(geometry: PageGeometry, dtype: jnp.dtype) -> None:
    if dtype not in (FP8_DTYPE, jnp.bfloat16):
        raise NotImplementedError(
            f"Mosaic page kernels have tiles for float8_e4m3fn and bfloat16, got {dtype}."
        )
    if geometry.page_size not in SUPPORTED_PAGE_SIZES:
        raise NotImplementedError(
            f"Mosaic page kernels have tiles for {SUPPORTED_PAGE_SIZES} tokens, got "
            f"page_size={geometry.page_size}."
        )
    if geometry.head_dim not in SUPPORTED_HEAD_DIMS:
        raise NotImplementedError(
            f"Mosaic page kernels have tiles for {SUPPORTED_HEAD_DIMS} dims, got "
            f"head_dim={geometry.head_dim}."
        )
