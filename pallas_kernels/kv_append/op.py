"""kv_append: quantizes new K and V rows and writes each into its slot."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import fp8
from pallas_kernels.dispatch import Implementation, dispatch, lazily
from pallas_kernels.kv_append import reference
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.kv_append.reference import BothStatistics
from pallas_kernels.pages.layout import KPages, Rows, VPages, page_geometry

_MOSAIC_GPU = "pallas_kernels.kv_append.mosaic_gpu"

type Scale = float | Float[Array, ""] | Float[Array, "num_kv_heads"]


@functools.partial(jax.jit, static_argnames=("statistics", "implementation"))
def kv_append(
    k_pages: KPages,
    v_pages: VPages,
    k: Rows,
    v: Rows,
    plan: AppendPlan,
    *,
    k_inv_scale: Scale | None = None,
    v_inv_scale: Scale | None = None,
    statistics: bool = False,
    implementation: Implementation | None = None,
) -> tuple[KPages, VPages, BothStatistics | None]:
    """Quantizes new rows of K and V and writes each into its slot.

    Equivalent to `k_pages[page, :, offset] = quantize_rows(k, k_inv_scale)` for each
    token that wins its slot, and the same for V; a plain cast where the pools are
    not FP8. Byte-equal on every implementation, up to the sign of a NaN. In place
    if the pools are donated to the outermost `jit`.

    Args:
      k_pages: pool of keys; owned by the caller, given up if donated.
      v_pages: pool of values.
      k: new keys, bfloat16 or float32, in units of the model's activations.
      v: new values, of k's shape and dtype.
      plan: `plan_append` of the batch's slot mapping and of these pools' sizes.
      k_inv_scale: reciprocal scale of K, one or per KV head; for FP8 pools only.
      v_inv_scale: reciprocal scale of V.
      statistics: also compute amax and counters of the batch, in the same pass; for
        FP8 pools only.
      implementation: `"mosaic_gpu"`, `"xla"`, or None for the best that works.

    Returns:
      The new k_pages and v_pages; then the statistics of K and of V over the plan's
      real tokens, or None if not asked for.

    Raises:
      ValueError: if shapes or dtypes disagree, on any implementation.
      NotImplementedError: if the one implementation asked for can't serve this call.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.kv_append import kv_append, plan_append
      >>> from pallas_kernels.pages.layout import make_pages
      >>> k_pages, v_pages = make_pages(4, 2, 64, 128, jnp.float8_e4m3fn)
      >>> plan = plan_append(jnp.array([65, -1]), num_pages=4, page_size=64)
      >>> k = v = jnp.ones((2, 2, 128), jnp.bfloat16)
      >>> k_pages, v_pages, _ = kv_append(
      ...     k_pages, v_pages, k, v, plan, k_inv_scale=2.0, v_inv_scale=2.0
      ... )
      >>> k_pages[1, 0, 1, 0].item(), k_pages[1, 0, 0, 0].item()
      (2.0, 0.0)
    """
    geometry = page_geometry(k_pages, v_pages)
    _check_rows(k, v, plan, geometry.num_kv_heads, geometry.head_dim)
    inv_scales = _inv_scales(k_pages, k_inv_scale, v_inv_scale)
    if statistics and not inv_scales:
        raise ValueError(
            f"Expected statistics=False for pools of {k_pages.dtype}: a layer without "
            "a scale has nothing to calibrate."
        )
    return dispatch(
        {"mosaic_gpu": lazily(_MOSAIC_GPU, "kv_append"), "xla": reference.kv_append},
        implementation,
        k_pages,
        v_pages,
        k,
        v,
        plan,
        inv_scales,
        statistics=statistics,
    )


def _check_rows(
    k: jax.Array, v: jax.Array, plan: AppendPlan, num_kv_heads: int, head_dim: int
) -> None:
    want = (plan.winners.size, num_kv_heads, head_dim)
    for name, rows in (("k", k), ("v", v)):
        if rows.shape != want:
            raise ValueError(
                f"Expected {name}.shape to be {want}, the num_tokens of plan and the "
                f"num_kv_heads and head_dim of k_pages, got {rows.shape}."
            )
    if k.dtype not in (jnp.bfloat16, jnp.float32) or v.dtype != k.dtype:
        raise ValueError(
            "Expected k and v to share one dtype of bfloat16, float32, got "
            f"{k.dtype} and {v.dtype}."
        )


def _inv_scales(
    k_pages: KPages, k_inv_scale: Scale | None, v_inv_scale: Scale | None
) -> tuple[Float[Array, "num_kv_heads"], ...]:
    """Brings scales to one per head: those of K and V, or none for other pools."""
    if not fp8.is_fp8(k_pages):
        if k_inv_scale is not None or v_inv_scale is not None:
            raise ValueError(
                "Expected k_inv_scale and v_inv_scale to be None for pools of "
                f"{k_pages.dtype}, which hold rows unscaled."
            )
        return ()
    if k_inv_scale is None or v_inv_scale is None:
        raise ValueError(
            "Expected k_inv_scale and v_inv_scale for FP8 pools, got "
            f"{k_inv_scale=} and {v_inv_scale=}; nothing falls back to 1."
        )
    num_kv_heads = k_pages.shape[1]
    return (
        fp8.per_head(k_inv_scale, num_kv_heads, name="k_inv_scale"),
        fp8.per_head(v_inv_scale, num_kv_heads, name="v_inv_scale"),
    )
