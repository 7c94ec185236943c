"""kv_append on Mosaic GPU: pieces of pages for long runs, single tokens for the rest."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.kv_append import mosaic_gpu_statistics as stats
from pallas_kernels.kv_append.config import AppendConfig, choose_config
from pallas_kernels.kv_append.mosaic_gpu_pages import append_pages
from pallas_kernels.kv_append.mosaic_gpu_tokens import append_tokens
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.kv_append.reference import BothStatistics
from pallas_kernels.pages.layout import KPages, PageGeometry, Rows, VPages

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (64, 128)


def kv_append(
    k_pages: KPages,
    v_pages: VPages,
    k: Rows,
    v: Rows,
    plan: AppendPlan,
    inv_scales: tuple[Float[Array, "num_kv_heads"], ...],
    *,
    statistics: bool,
    config: AppendConfig | None = None,
    interpret: Any = None,
) -> tuple[KPages, VPages, BothStatistics | None]:
    """Writes rows into their slots; see `op.kv_append`.

    Raises:
      NotImplementedError: for what these kernels don't serve, with the reason.
    """
    _check_served(k_pages, k)
    if config is None:
        geometry = PageGeometry(*k_pages.shape)
        config = choose_config(
            k.shape[0], geometry, k_pages.dtype, statistics=statistics
        )
    # A kernel writes a ref in place; an array it would have to copy first.
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)
    arguments = (k_ref, v_ref, k, v, plan, inv_scales)
    keywords = {"statistics": statistics, "config": config, "interpret": interpret}
    if plan.page_items.shape[0] == 0:
        both = append_tokens(*arguments, **keywords)
    else:
        partials = append_pages(*arguments, **keywords)
        both = stats.merge(partials) if statistics else None
    return k_ref[...], v_ref[...], both


def _check_served(k_pages: KPages, k: Rows) -> None:
    geometry = PageGeometry(*k_pages.shape)
    if k_pages.dtype not in (FP8_DTYPE, jnp.bfloat16):
        raise NotImplementedError(
            f"Mosaic's kv_append serves FP8 and BF16 pools, got {k_pages.dtype}."
        )
    if k.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"Mosaic's kv_append serves bfloat16 rows, got {k.dtype}."
        )
    if geometry.head_dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"Mosaic's kv_append serves head_dim {HEAD_DIMS}, got {geometry.head_dim}."
        )
    if geometry.page_size not in PAGE_SIZES:
        raise NotImplementedError(
            f"Mosaic's kv_append serves page sizes {PAGE_SIZES}, got "
            f"{geometry.page_size}."
        )
