"""The paged KV cache: one pair of page pools for each layer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.pages import make_pages
from pallas_kernels.pages.layout import KPages, VPages, page_geometry, pool_dtype

CACHE_DTYPES = {
    "fp8": jnp.dtype(FP8_DTYPE),
    "bf16": jnp.dtype(jnp.bfloat16),
    "float32": jnp.dtype(jnp.float32),
}


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes and dtypes of a cache, checked when built.

    Args:
      num_layers: layers of the model that hold K and V.
      num_kv_heads: KV heads of each layer.
      head_dim: elements of a head.
      num_pages: pages of each layer's pool.
      page_size: tokens a page holds; 64 or 128 for the GPU kernels.
      dtype: "fp8", "bf16", or "float32" (served by the fallback alone).
      high_precision_layers: layers that do not take part in FP8.
      high_precision_dtype: what those layers hold instead.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int = 128
    dtype: str = "fp8"
    high_precision_layers: tuple[int, ...] = ()
    high_precision_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_pages"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Expected {name} to be at least 1, got {getattr(self, name)}."
                )
        if self.page_size < 8 or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"Expected page_size to be a power of two from 8 on, "
                f"got {self.page_size}; the GPU kernels serve 64 and 128."
            )
        for name in ("dtype", "high_precision_dtype"):
            if getattr(self, name) not in CACHE_DTYPES:
                raise ValueError(
                    f"Expected {name} to be one of {sorted(CACHE_DTYPES)}, "
                    f"got {getattr(self, name)!r}."
                )
        if self.high_precision_dtype == "fp8":
            raise ValueError("Expected high_precision_dtype to be wider than fp8.")
        wrong = [i for i in self.high_precision_layers if not 0 <= i < self.num_layers]
        if wrong:
            raise ValueError(
                f"Expected high_precision_layers to be within 0..{self.num_layers - 1}"
                f", the model's layers, got {wrong}."
            )

    def layer_dtype(self, layer: int) -> str:
        """Names the dtype of one layer's pools."""
        if layer in self.high_precision_layers:
            return self.high_precision_dtype
        return self.dtype

    @property
    def fp8_layers(self) -> tuple[int, ...]:
        """The layers whose pools hold FP8 codes."""
        layers = range(self.num_layers)
        return tuple(i for i in layers if self.layer_dtype(i) == "fp8")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers, scales apart."""
        values = 2 * self.num_kv_heads * self.head_dim
        layers = range(self.num_layers)
        sizes = [CACHE_DTYPES[self.layer_dtype(i)].itemsize for i in layers]
        return values * sum(sizes)

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKVCache:
    """Page pools of every layer; donate it to the step that takes it."""

    k_pages: tuple[KPages, ...]
    v_pages: tuple[VPages, ...]

    @property
    def num_layers(self) -> int:
        return len(self.k_pages)

    @property
    def page_size(self) -> int:
        return page_geometry(self.k_pages[0], self.v_pages[0]).page_size

    @property
    def num_pages(self) -> int:
        return page_geometry(self.k_pages[0], self.v_pages[0]).num_pages

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.k_pages, *self.v_pages))


def init_cache(config: CacheConfig) -> PagedKVCache:
    """Makes a cache of zeroed pools.

    On a CPU FP8 pools hold the bytes of their codes (uint8), on a GPU E4M3.

    Returns:
      A cache that owns its buffers.
    """
    pools = [
        make_pages(
            config.num_pages,
            config.num_kv_heads,
            config.page_size,
            config.head_dim,
            pool_dtype(CACHE_DTYPES[config.layer_dtype(layer)]),
        )
        for layer in range(config.num_layers)
    ]
    k_pages, v_pages = zip(*pools, strict=True)
    return PagedKVCache(k_pages=k_pages, v_pages=v_pages)
