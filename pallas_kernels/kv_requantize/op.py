"""Public ops that rewrite FP8 pages at new scales, in place on donated pools."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch, lazily
from pallas_kernels.fp8 import is_fp8, per_head
from pallas_kernels.kv_requantize import reference
from pallas_kernels.kv_requantize.plan import RequantizePlan as RequantizePlan
from pallas_kernels.kv_requantize.plan import plan_requantize as plan_requantize
from pallas_kernels.pages.layout import (
    KPages,
    PageGeometry,
    Rows,
    VPages,
    page_geometry,
)

_MOSAIC_GPU = "pallas_kernels.kv_requantize.mosaic_gpu"

type Scale = float | Float[Array, ""] | Float[Array, "num_kv_heads"]


@functools.partial(jax.jit, static_argnames=("implementation",))
def requantize_staged(
    k_pages: KPages,
    v_pages: VPages,
    staged_k: Rows,
    staged_v: Rows,
    slot_owner: Int[Array, "num_slots"],
    plan: RequantizePlan,
    *,
    k_inv_scale: Scale,
    v_inv_scale: Scale,
    implementation: Implementation | None = None,
) -> tuple[KPages, VPages]:
    """Rewrites each slot that owns a staged row from that row.

    Equivalent to `quantize_rows(staged[owner], inv_scale)` written into every slot
    with `owner >= 0`; the others keep their bytes. Several slots may own one row (a
    copied page), and owners need no order.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.pages import make_pages, read_slots
      >>> k_pages, v_pages = make_pages(2, 1, 16, 64, jnp.float8_e4m3fn)
      >>> rows = jnp.ones((3, 1, 64), jnp.bfloat16)
      >>> slot_owner = jnp.full((32,), -1, jnp.int32).at[5].set(2)
      >>> k_pages, v_pages = requantize_staged(
      ...     k_pages, v_pages, rows, rows, slot_owner,
      ...     plan_requantize(slot_owner, page_size=16),
      ...     k_inv_scale=2.0, v_inv_scale=4.0)
      >>> k, v = read_slots(k_pages, v_pages, jnp.array([5, 6]))
      >>> k[:, 0, 0].tolist(), v[:, 0, 0].tolist()
      ([2.0, 0.0], [4.0, 0.0])

    Args:
      k_pages: FP8 pool of keys, given up if donated at the outermost jit.
      v_pages: FP8 pool of values, likewise.
      staged_k: BF16 rows of keys, in units of the model's activations.
      staged_v: BF16 rows of values.
      slot_owner: row that a slot holds, negative for none; below the number of rows.
      plan: what `plan_requantize` made of this slot_owner.
      k_inv_scale: reciprocal scale of the keys, per tensor or per head, > 0.
      v_inv_scale: reciprocal scale of the values.
      implementation: None for the best that works on this device.

    Returns:
      the two pools.

    Raises:
      ValueError: if shapes or dtypes disagree, on any implementation.
      NotImplementedError: if the one implementation asked for can't serve this call.
    """
    geometry = _fp8_geometry(k_pages, v_pages)
    _check_staged(geometry, staged_k, staged_v)
    _check_ownership(geometry, slot_owner, plan)
    scales = {
        "k_inv_scale": per_head(k_inv_scale, geometry.num_kv_heads, name="k_inv_scale"),
        "v_inv_scale": per_head(v_inv_scale, geometry.num_kv_heads, name="v_inv_scale"),
    }
    if staged_k.shape[0] == 0:
        return k_pages, v_pages
    return dispatch(
        {
            "mosaic_gpu": lazily(_MOSAIC_GPU, "requantize_staged"),
            "xla": reference.requantize_staged,
        },
        implementation,
        *(k_pages, v_pages, staged_k, staged_v, slot_owner, plan),
        **scales,
    )


@functools.partial(jax.jit, static_argnames=("implementation",))
def requantize_pages(
    k_pages: KPages,
    v_pages: VPages,
    *,
    k_scale: Scale,
    v_scale: Scale,
    k_inv_scale: Scale,
    v_inv_scale: Scale,
    page_mask: Bool[Array, "num_pages"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[KPages, VPages]:
    """Moves codes from one scale to another without their BF16 rows.

    Equivalent to `saturating_cast(float32(code) * scale * inv_scale)`, multiplied in
    that order; NaN codes stay NaN. It rounds a second time: where the staged rows
    are at hand, `requantize_staged` loses nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.pages import make_pages
      >>> k_pages, v_pages = make_pages(2, 1, 16, 64, jnp.float8_e4m3fn)
      >>> k_pages, v_pages = requantize_pages(
      ...     k_pages + 3, v_pages + 3, k_scale=2.0, v_scale=2.0,
      ...     k_inv_scale=1.0, v_inv_scale=0.25)
      >>> float(k_pages[0, 0, 0, 0]), float(v_pages[0, 0, 0, 0])
      (6.0, 1.5)

    Args:
      k_pages: FP8 pool of keys, given up if donated at the outermost jit.
      v_pages: FP8 pool of values, likewise.
      k_scale: scale the codes of the keys were written with, per tensor or per head.
      v_scale: scale of the values.
      k_inv_scale: reciprocal of the new scale of the keys, > 0.
      v_inv_scale: reciprocal of the new scale of the values.
      page_mask: pages to rewrite, the others keep their bytes; None for all.
      implementation: None for the best that works on this device.

    Returns:
      the two pools.

    Raises:
      ValueError: if shapes or dtypes disagree, on any implementation.
      NotImplementedError: if the one implementation asked for can't serve this call.
    """
    geometry = _fp8_geometry(k_pages, v_pages)
    given = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_inv_scale": k_inv_scale,
        "v_inv_scale": v_inv_scale,
    }
    scales = {
        name: per_head(scale, geometry.num_kv_heads, name=name)
        for name, scale in given.items()
    }
    if page_mask is not None and (
        page_mask.shape != (geometry.num_pages,) or page_mask.dtype != jnp.bool
    ):
        raise ValueError(
            f"Expected page_mask to be bool [{geometry.num_pages}], one per page of "
            f"k_pages, got {page_mask.dtype} {page_mask.shape}."
        )
    return dispatch(
        {
            "mosaic_gpu": lazily(_MOSAIC_GPU, "requantize_pages"),
            "xla": reference.requantize_pages,
        },
        implementation,
        *(k_pages, v_pages, page_mask),
        **scales,
    )


def _fp8_geometry(k_pages: KPages, v_pages: VPages) -> PageGeometry:
    geometry = page_geometry(k_pages, v_pages)
    if not is_fp8(k_pages):
        raise ValueError(
            f"Expected float8_e4m3fn pools, got {k_pages.dtype}: only codes have a "
            "scale to change."
        )
    return geometry


def _check_staged(geometry: PageGeometry, staged_k: Rows, staged_v: Rows) -> None:
    want = (geometry.num_kv_heads, geometry.head_dim)
    if staged_k.shape[1:] != want or staged_k.ndim != 3:
        raise ValueError(
            f"Expected {staged_k.shape=} to be [num_rows, *{want}], the num_kv_heads "
            "and head_dim of k_pages."
        )
    if staged_v.shape != staged_k.shape:
        raise ValueError(
            f"Expected {staged_v.shape=} to equal {staged_k.shape=}, row for row."
        )
    if staged_k.dtype != jnp.bfloat16 or staged_v.dtype != jnp.bfloat16:
        raise ValueError(
            "Expected staged rows in bfloat16, as they were appended, got "
            f"{staged_k.dtype} and {staged_v.dtype}."
        )


def _check_ownership(
    geometry: PageGeometry, slot_owner: Int[Array, "num_slots"], plan: RequantizePlan
) -> None:
    if slot_owner.shape != (geometry.num_slots,) or slot_owner.dtype != jnp.int32:
        raise ValueError(
            f"Expected slot_owner to be int32 [{geometry.num_slots}], one per slot of "
            f"k_pages, got {slot_owner.dtype} {slot_owner.shape}."
        )
    if plan.pages.shape != (geometry.num_pages,):
        raise ValueError(
            f"Expected {plan.pages.shape=} to be ({geometry.num_pages},): plan with "
            f"page_size={geometry.page_size}, that of k_pages."
        )
