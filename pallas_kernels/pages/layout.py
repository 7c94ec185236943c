"""The byte layout of a page: the one place that knows where a token's K and V lie.

K pages are `[num_pages, num_kv_heads, page_size, head_dim]`, V pages
`[num_pages, num_kv_heads, head_dim, page_size]`: V is token-contiguous, so that both
tiles go from memory straight into FP8 tensor-core products, which take only
operands whose contraction axis is contiguous.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.fp8 import CODES_DTYPE, FP8_DTYPE

PAD_SLOT = -1
POOL_DTYPES = (FP8_DTYPE, CODES_DTYPE, jnp.bfloat16, jnp.float32)

type KPages = Shaped[Array, "num_pages num_kv_heads page_size head_dim"]
type VPages = Shaped[Array, "num_pages num_kv_heads head_dim page_size"]
type Rows = Float[Array, "num_tokens num_kv_heads head_dim"]


class PageGeometry(NamedTuple):
    """The sizes of a pair of pools."""

    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


def page_geometry(k_pages: KPages, v_pages: VPages) -> PageGeometry:
    """Reads the sizes of a pair of pools.

    Raises:
      ValueError: if the two do not belong together or have a dtype of no pool.
    """
    if k_pages.ndim != 4:
        raise ValueError(
            "Expected k_pages to be [num_pages, num_kv_heads, page_size, head_dim], "
            f"got shape {k_pages.shape}."
        )
    geometry = PageGeometry(*k_pages.shape)
    want = (*k_pages.shape[:2], geometry.head_dim, geometry.page_size)
    if v_pages.shape != want:
        raise ValueError(
            f"Expected {v_pages.shape=} to be {want}, the v_pages of {k_pages.shape=}."
        )
    if k_pages.dtype not in POOL_DTYPES or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            "Expected k_pages and v_pages to share one dtype of float8_e4m3fn, "
            f"uint8 (bytes of FP8), bfloat16, float32, got {k_pages.dtype} and {v_pages.dtype}."
        )
    return geometry


def make_pages(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> tuple[KPages, VPages]:
    """Makes a pair of zeroed pools.

    Args:
      num_pages: pages of the pool.
      num_kv_heads: KV heads of the layer.
      page_size: tokens a page holds.
      head_dim: elements of a head.
      dtype: float8_e4m3fn, bfloat16, or for the fallback only float32 or uint8 (the
        bytes of FP8 codes).

    Returns:
      k_pages and v_pages.
    """
    k_pages = jnp.zeros((num_pages, num_kv_heads, page_size, head_dim), dtype)
    v_pages = jnp.zeros((num_pages, num_kv_heads, head_dim, page_size), dtype)
    page_geometry(k_pages, v_pages)
    return k_pages, v_pages


def read_slots(
    k_pages: KPages, v_pages: VPages, slots: Int[Array, "num_tokens"]
) -> tuple[Rows, Rows]:
    """Reads the rows at some slots, as FP8 or wider. A slot of -1 reads slot 0."""
    page_size = page_geometry(k_pages, v_pages).page_size
    page, offset = jnp.divmod(jnp.maximum(slots, 0), page_size)
    k, v = as_bits(k_pages)[page, :, offset], as_bits(v_pages)[page, :, :, offset]
    return as_floats(k, k_pages.dtype), as_floats(v, v_pages.dtype)


def write_slots(
    k_pages: KPages,
    v_pages: VPages,
    k: Rows,
    v: Rows,
    slots: Int[Array, "num_tokens"],
) -> tuple[KPages, VPages]:
    """Writes rows (FP8, or of the pools' dtype) into slots; -1 writes nothing.

    In place on donated pools. The scatter works on the codes as integers: XLA widens
    a whole FP8 pool to scatter into it on the CPU.
    """
    geometry = page_geometry(k_pages, v_pages)
    # JAX wraps -1 to the last slot even with mode="drop": send it past the end.
    slots = jnp.where(slots < 0, geometry.num_slots, slots)
    # Plain division: slots are not negative here, and floor division costs more.
    page = lax.div(slots, jnp.int32(geometry.page_size))
    offset = lax.rem(slots, jnp.int32(geometry.page_size))
    k_bits, v_bits = as_bits(k_pages), as_bits(v_pages)
    k_bits = k_bits.at[page, :, offset].set(as_bits(k), mode="drop")
    v_bits = v_bits.at[page, :, :, offset].set(as_bits(v), mode="drop")
    pools = from_bits(k_bits, k_pages.dtype), from_bits(v_bits, v_pages.dtype)
    # Else XLA on the CPU repeats the write inside each reader's fusion.
    return lax.optimization_barrier(pools)


def pool_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Says how this machine's default device holds pools of a dtype."""
    if dtype == FP8_DTYPE and jax.default_backend() == "cpu":
        return jnp.dtype(CODES_DTYPE)
    return jnp.dtype(dtype)


def as_bits(x: jax.Array) -> jax.Array:
    """Views floats as unsigned integers of their width."""
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))


def from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Views the integers of `as_bits` as floats again."""
    return lax.bitcast_convert_type(x, dtype)


def as_floats(bits: jax.Array, pool_dtype: jnp.dtype) -> jax.Array:
    """Views integers taken from a pool as what they mean; bytes of FP8 as FP8."""
    held_as_bytes = pool_dtype == CODES_DTYPE
    return from_bits(bits, jnp.dtype(FP8_DTYPE) if held_as_bytes else pool_dtype)
