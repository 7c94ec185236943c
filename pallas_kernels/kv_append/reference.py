"""The definition of kv_append in plain jnp; serves any page size and dtype of pool."""

from jaxtyping import Array, Float

from pallas_kernels import fp8
from pallas_kernels.kv_append.plan import AppendPlan
from pallas_kernels.pages import layout
from pallas_kernels.pages.layout import KPages, Rows, VPages

type BothStatistics = tuple[fp8.RowStatistics, fp8.RowStatistics]


def kv_append(
    k_pages: KPages,
    v_pages: VPages,
    k: Rows,
    v: Rows,
    plan: AppendPlan,
    inv_scales: tuple[Float[Array, "num_kv_heads"], ...],
    *,
    statistics: bool,
) -> tuple[KPages, VPages, BothStatistics | None]:
    """Writes rows into their slots; see `op.kv_append`.

    `inv_scales` holds that of K and that of V for FP8 pools, nothing for others.
    """
    if inv_scales:
        k_inv_scale, v_inv_scale = inv_scales
        k_rows = fp8.quantize_rows(k, k_inv_scale)
        v_rows = fp8.quantize_rows(v, v_inv_scale)
    else:
        k_rows, v_rows = k.astype(k_pages.dtype), v.astype(v_pages.dtype)
    pools = layout.write_slots(k_pages, v_pages, k_rows, v_rows, plan.winners)
    if not statistics:
        return *pools, None
    return *pools, (
        fp8.row_statistics(k, inv_scales[0], plan.real),
        fp8.row_statistics(v, inv_scales[1], plan.real),
    )
