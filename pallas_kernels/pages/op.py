"""Public ops on pages as opaque things: copy, gather to dense rows, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from pallas_kernels.dispatch import Implementation, dispatch, lazily
from pallas_kernels.pages import reference
from pallas_kernels.pages.layout import KPages, VPages, page_geometry
from pallas_kernels.pages.reference import Dense

_MOSAIC_GPU = "pallas_kernels.pages.mosaic_gpu"


@functools.partial(jax.jit, static_argnames=("implementation",))
def copy_pages(
    k_pages: KPages,
    v_pages: VPages,
    sources: Int[Array, "num_copies"],
    destinations: Int[Array, "num_copies"],
    *,
    implementation: Implementation | None = None,
) -> tuple[KPages, VPages]:
    """Copies whole pages inside a pair of pools, bit for bit.

    Destinations must be distinct, and none may be a source of the same call: the
    copies run in no order. `check_page_copies` checks that on the host.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.pages import make_pages
      >>> k_pages, v_pages = make_pages(3, 1, 16, 64, jnp.bfloat16)
      >>> k_pages, v_pages = copy_pages(
      ...     k_pages.at[0].set(1), v_pages, jnp.array([0, -1]), jnp.array([2, 1]))
      >>> k_pages[:, 0, 0, 0].tolist()
      [1.0, 0.0, 1.0]

    Args:
      k_pages: pool of keys, given up if donated at the outermost jit.
      v_pages: pool of values, likewise.
      sources: page that each copy reads; negative for no copy.
      destinations: page that each copy writes; negative for no copy.
      implementation: None for the best that works on this device.

    Returns:
      the two pools.

    Raises:
      ValueError: if shapes or dtypes disagree, on any implementation.
      NotImplementedError: if the one implementation asked for can't serve this call.
    """
    page_geometry(k_pages, v_pages)
    if sources.ndim != 1 or sources.shape != destinations.shape:
        raise ValueError(
            "Expected sources and destinations to be [num_copies] alike, got shapes "
            f"{sources.shape} and {destinations.shape}."
        )
    if sources.dtype != jnp.int32 or destinations.dtype != jnp.int32:
        raise ValueError(
            "Expected sources and destinations in int32, got "
            f"{sources.dtype} and {destinations.dtype}."
        )
    if sources.size == 0:
        return k_pages, v_pages
    return dispatch(
        {"mosaic_gpu": lazily(_MOSAIC_GPU, "copy_pages"), "xla": reference.copy_pages},
        implementation,
        *(k_pages, v_pages, sources, destinations),
    )


@functools.partial(jax.jit, static_argnames=("implementation",))
def gather_sequences(
    k_pages: KPages,
    v_pages: VPages,
    block_table: Int[Array, "num_seqs pages_per_seq"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Dense, Dense]:
    """Gathers the pages of sequences into dense token-major rows.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.pages import make_pages
      >>> k_pages, v_pages = make_pages(3, 2, 16, 64, jnp.bfloat16)
      >>> k, v = gather_sequences(k_pages, v_pages, jnp.array([[0, 2]]))
      >>> k.shape
      (1, 32, 2, 64)

    Args:
      k_pages: pool of keys.
      v_pages: pool of values.
      block_table: page of each stretch of a sequence. Entries out of range are
        clamped: past a sequence's end may stand anything, and so it may in the rows.
      implementation: None for the best that works on this device.

    Returns:
      the rows of K and V, in the pools' dtype.

    Raises:
      ValueError: if shapes or dtypes disagree, on any implementation.
      NotImplementedError: if the one implementation asked for can't serve this call.
    """
    page_geometry(k_pages, v_pages)
    if block_table.ndim != 2 or block_table.dtype != jnp.int32:
        raise ValueError(
            "Expected block_table to be int32 [num_seqs, pages_per_seq], got "
            f"{block_table.dtype} {block_table.shape}."
        )
    return dispatch(
        {
            "mosaic_gpu": lazily(_MOSAIC_GPU, "gather_sequences"),
            "xla": reference.gather_sequences,
        },
        implementation,
        *(k_pages, v_pages, block_table),
    )


def check_page_copies(
    sources: np.ndarray, destinations: np.ndarray, num_pages: int
) -> None:
    """Checks on the host what `copy_pages` takes for granted.

    Args:
      sources: page that each copy reads; negative for no copy.
      destinations: page that each copy writes; negative for no copy.
      num_pages: pages of the pool.

    Raises:
      ValueError: if a page is out of range, written twice, or written and read.
    """
    sources, destinations = np.asarray(sources), np.asarray(destinations)
    live = (sources >= 0) & (destinations >= 0)
    sources, destinations = sources[live], destinations[live]
    beyond = [page for page in (*sources, *destinations) if page >= num_pages]
    if beyond:
        raise ValueError(
            f"Expected pages below {num_pages=}, got {sorted(map(int, beyond))}."
        )
    pages, times = np.unique(destinations, return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"Expected distinct destinations, got {pages[times > 1].tolist()} more "
            "than once."
        )
    both = np.intersect1d(sources, destinations)
    if both.size:
        raise ValueError(
            f"Expected no destination to be a source too, got {both.tolist()}: split "
            "the copies into two calls."
        )


def pages_sharding(heads_axis: str, pages_axis: str | None = None) -> PartitionSpec:
    """Gives the sharding of either pool: KV heads over one mesh axis, pages over one.

    Example:
      >>> pages_sharding("heads") == PartitionSpec(None, "heads", None, None)
      True
    """
    return PartitionSpec(pages_axis, heads_axis, None, None)
