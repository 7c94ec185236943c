"""Requantization in plain jnp: the definition, and the fallback on any device."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp8 import quantize_rows, saturating_cast
from pallas_kernels.kv_requantize.plan import RequantizePlan
from pallas_kernels.pages.layout import (
    KPages,
    Rows,
    VPages,
    as_bits,
    as_floats,
    from_bits,
)


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
) -> tuple[KPages, VPages]:
    """Rewrites the owned slots page by page, so that only the plan's pages move.

    The loop carries the pools as integers: XLA would widen a whole FP8 pool to update
    a page of it on the CPU, and codes that stay must stay bit for bit. Pools that are
    held as bytes (`pool_dtype`) are rewritten in place; viewing an FP8 pool as
    integers costs a pass over it on the way in and out.
    """
    page_size = k_pages.shape[2]
    last_row = staged_k.shape[0] - 1

    def rewrite(index: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        page = plan.pages[index]
        owners = lax.dynamic_slice(slot_owner, (page * page_size,), (page_size,))
        rows = jnp.clip(owners, 0, last_row)
        k_codes = as_bits(quantize_rows(staged_k[rows], k_inv_scale))
        v_codes = as_bits(quantize_rows(staged_v[rows], v_inv_scale))
        owned = owners >= 0
        k_bits, v_bits = pools
        return (
            _blend(k_bits, page, k_codes.transpose(1, 0, 2), owned[None, :, None]),
            _blend(v_bits, page, v_codes.transpose(1, 2, 0), owned[None, None, :]),
        )

    bits = lax.fori_loop(0, plan.count, rewrite, (as_bits(k_pages), as_bits(v_pages)))
    dtype = k_pages.dtype
    return from_bits(bits[0], dtype), from_bits(bits[1], dtype)


def requantize_pages(
    k_pages: KPages,
    v_pages: VPages,
    page_mask: Bool[Array, "num_pages"] | None,
    *,
    k_scale: Float[Array, "num_kv_heads"],
    v_scale: Float[Array, "num_kv_heads"],
    k_inv_scale: Float[Array, "num_kv_heads"],
    v_inv_scale: Float[Array, "num_kv_heads"],
) -> tuple[KPages, VPages]:
    """Requantizes every code, elementwise: K's and V's layouts are alike to it."""
    return (
        _rescale(k_pages, page_mask, k_scale, k_inv_scale),
        _rescale(v_pages, page_mask, v_scale, v_inv_scale),
    )


def _blend(pool: Array, page: Array, codes: Array, owned: Array) -> Array:
    old = lax.dynamic_index_in_dim(pool, page, keepdims=False)
    new = jnp.where(jnp.broadcast_to(owned, old.shape), codes, old)
    return lax.dynamic_update_index_in_dim(pool, new, page, 0)


def _rescale(
    pages: jax.Array,
    page_mask: Bool[Array, "num_pages"] | None,
    scale: Float[Array, "num_kv_heads"],
    inv_scale: Float[Array, "num_kv_heads"],
) -> jax.Array:
    # Behind a barrier neither a caller's quantization nor a constant scale can be
    # folded into the two products, whose roundings are part of the result.
    codes, scale, inv_scale = lax.optimization_barrier((pages, scale, inv_scale))
    x = as_floats(as_bits(codes), codes.dtype).astype(jnp.float32)
    x = x * scale[None, :, None, None]
    rescaled = as_bits(saturating_cast(x * inv_scale[None, :, None, None]))
    if page_mask is not None:
        chosen = jnp.broadcast_to(page_mask[:, None, None, None], pages.shape)
        rescaled = jnp.where(chosen, rescaled, as_bits(codes))
    return from_bits(rescaled, pages.dtype)
