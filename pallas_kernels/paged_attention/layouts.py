"""How the kernels spread arrays over the registers of a warpgroup."""

from typing import Any

import jax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu


def _tiled_layout(tiling: Any, warp: tuple, lane: tuple, vector: int) -> Any:
    layout = fa.TiledLayout(
        plgpu.Tiling(tiling), warp, lane, vector, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling,
        warp_dims=layout.warp_dims,
        lane_dims=layout.lane_dims,
        vector_dim=layout.vector_dim,
    )


PRODUCT = plgpu.Layout.WGMMA
PRODUCT_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
# 8 x 64 elements: two rows for each warp, 16 lanes of 4 elements for each row.
ROWS = _tiled_layout(((8, 64), (2, 64), (1, 4)), (-6,), (-4, -3), -1)
# 64 elements over 32 lanes, the same in each of the four warps.
HALF_ROW = _tiled_layout(((64,), (2,)), (fa.Replicated(4),), (-2,), -1)
# 16 x 64 elements: four rows for each warp, 8 lanes of 8 elements for each row.
WIDE_ROWS = _tiled_layout(((16, 64), (4, 64), (1, 8)), (-6,), (-4, -3), -1)


def store(ref: Any, x: jax.Array) -> None:
    """Stores in any layout, where conflicts of banks or lines do not matter."""
    # jax 0.11 has no `store`, and no check of plain stores that would need it.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
