"""Many devices: where heads, pages and sequences lie, and our kernels on each device.

A step over a mesh means what it means on one device: heads, pages, slots and counters
are numbered globally, and a `Placement` only says which device holds what. The model
is XLA's to partition; our kernels run under `jax.shard_map`, each on its own heads and
pages. What they observed is merged once per step, so that scales do not depend on how
many devices there are.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from fp8kv_jax.batch import Batch, MixedBatch
from fp8kv_jax.cache import CacheConfig, PagedKVCache, init_cache
from fp8kv_jax.calibration import CalibrationState
from pallas_kernels.pages import pages_sharding

# Axes of a placement's mesh: sequences and pages; KV heads; query heads of a KV head.
DATA, KV_HEADS, QUERIES = "data", "kv_heads", "queries"
AXES = (DATA, KV_HEADS, QUERIES)

REPLICATED = PartitionSpec()
BY_DATA = PartitionSpec(DATA)
BY_HEAD = PartitionSpec(KV_HEADS)
POOL = pages_sharding(KV_HEADS, DATA)
ROWS = PartitionSpec(DATA, KV_HEADS)
STAGED_ROWS = PartitionSpec(None, None, KV_HEADS)
QUERY_ROWS = PartitionSpec(DATA, None, (KV_HEADS, QUERIES))

_PLACED = PagedKVCache, CalibrationState, Batch, MixedBatch


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh whose axes are called `AXES`; from `place`, or made by hand.

    KV heads are split over `kv_heads` and held alike by all devices along `queries`,
    which share the query heads of each KV head. Pages and sequences are split over
    `data`, in equal stretches: a sequence's pages lie in the stretch of pages that
    belongs to its stretch of the batch.
    """

    mesh: Mesh | AbstractMesh

    def __post_init__(self) -> None:
        if self.mesh.axis_names != AXES:
            raise ValueError(
                f"Expected the axes of a placement's mesh to be {AXES}, got "
                f"{self.mesh.axis_names}: `place` makes one from any mesh."
            )

    @property
    def num_data(self) -> int:
        return self.mesh.shape[DATA]

    @property
    def num_kv_splits(self) -> int:
        """Parts that the KV heads are split into, each a whole number of heads."""
        return self.mesh.shape[KV_HEADS]

    @property
    def num_tensor(self) -> int:
        """Devices that share one sequence's heads."""
        return self.mesh.shape[KV_HEADS] * self.mesh.shape[QUERIES]

    def sharding(self, *spec: Any) -> NamedSharding:
        """Makes a sharding in the one form that `jit` gives its results.

        Axes of size 1 split nothing; left in, the second step would look as if it came
        from elsewhere and compile again.
        """

        def splitting(names: Any) -> Any:
            names = names if isinstance(names, tuple) else (names,)
            kept = tuple(x for x in names if x is not None and self.mesh.shape[x] > 1)
            return kept if len(kept) > 1 else next(iter(kept), None)

        kept = [splitting(names) for names in spec]
        while kept and kept[-1] is None:
            kept.pop()
        return NamedSharding(self.mesh, PartitionSpec(*kept))

    def shardings[T](self, tree: T) -> T:
        """Says where the parts of a cache, a state or a batch lie, or of several.

        Returns:
          The same tree with a sharding for each array: what `jit` takes as
          `out_shardings`, and Orbax to restore into.

        Raises:
          TypeError: if there is anything else.
        """
        return jax.tree.map(
            self._shardings_of, tree, is_leaf=lambda x: isinstance(x, _PLACED)
        )

    def _shardings_of(self, tree: Any) -> Any:
        match tree:
            case PagedKVCache():
                return self._all(tree, POOL)
            case CalibrationState():
                staged = tree.staged
                if staged is not None:
                    owner = self._all(staged.slot_owner, REPLICATED)
                    staged = self._all(staged, STAGED_ROWS)
                    staged = replace(staged, slot_owner=owner)
                others = self._all(replace(tree, staged=None), REPLICATED)
                return replace(others, staged=staged)
            case Batch():
                copies = self.sharding()
                return replace(self._all(tree, BY_DATA), page_copies=copies)
            case MixedBatch():
                return self._all(tree, REPLICATED)
        raise TypeError(
            "Expected a PagedKVCache, a CalibrationState or a batch, got "
            f"{type(tree).__name__}."
        )

    def _all(self, tree: Any, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda _: self.sharding(*spec), tree)

    def put[T](self, tree: T) -> T:
        """Copies a cache, a state or a batch to where it belongs.

        In several processes each calls it with equal values and copies its own part.
        """
        return jax.tree.map(put_array, tree, self.shardings(tree))

    def put_replicated[T](self, tree: T) -> T:
        """Copies arrays to every device, whole."""
        return jax.tree.map(lambda x: put_array(x, self.sharding()), tree)

    def make[T](self, make: Callable[[], T]) -> T:
        """Makes a cache or a state in place: no device ever holds all of it.

        >>> cache = placement.make(lambda: init_cache(config))
        """
        return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make)))()

    def constrain[T](self, tree: T) -> T:
        """Keeps a cache or a state where it belongs, inside `jit`."""
        return lax.with_sharding_constraint(tree, self.shardings(tree))


def make_cache(config: CacheConfig, placement: Placement | None) -> PagedKVCache:
    """Makes a cache of zeroed pools, on a placement or on one device."""
    make = functools.partial(init_cache, config)
    return make() if placement is None else placement.make(make)


def put_array(x: Any, sharding: NamedSharding) -> jax.Array:
    """Copies an array to the devices of a sharding, also those of other processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def place(
    mesh: Mesh,
    num_kv_heads: int,
    *,
    tensor: str = "tensor",
    data: str | None = None,
) -> Placement:
    """Finds a place on a mesh for every head.

    With 8 devices and 2 KV heads each head is held by 4 devices, which share its query
    heads.

    >>> place(jax.make_mesh((1,), ("tensor",)), num_kv_heads=2).mesh.axis_names
    ('data', 'kv_heads', 'queries')

    Args:
      mesh: any mesh; axes that are not named here must be of size 1.
      num_kv_heads: KV heads of the model. Fewer than devices are held by several.
      tensor: axis over which heads and weights are split.
      data: axis over which sequences and pages are split; None for none.

    Raises:
      ValueError: if the mesh lacks an axis, or heads do not divide evenly.
    """
    names = (tensor,) if data is None else (data, tensor)
    missing = [name for name in names if name not in mesh.axis_names]
    others = [n for n in mesh.axis_names if n not in names and mesh.shape[n] > 1]
    if missing or others:
        raise ValueError(
            f"Expected a mesh split over {names} alone, got {dict(mesh.shape)}."
        )
    num_tensor = mesh.shape[tensor]
    if num_kv_heads % num_tensor and num_tensor % num_kv_heads:
        raise ValueError(
            f"Expected {num_kv_heads=} to be a multiple or a divisor of the "
            f"{num_tensor} devices of axis {tensor!r}."
        )
    num_data = 1 if data is None else mesh.shape[data]
    order = [mesh.axis_names.index(name) for name in names]
    rest = [i for i in range(mesh.devices.ndim) if i not in order]
    split = min(num_kv_heads, num_tensor)
    devices = mesh.devices.transpose(*order, *rest)
    devices = devices.reshape(num_data, split, num_tensor // split)
    # Auto: XLA partitions the model, which says nothing about axes.
    return Placement(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3))


def join_batches(batches: Sequence[Batch], *, num_pages: int, page_size: int) -> Batch:
    """Makes one batch for a data axis from one of each of its stretches of pages.

    Args:
      batches: of equal shapes, with slots and pages numbered from 0 in each.
      num_pages: pages of the whole cache.
      page_size: tokens a page holds.

    Raises:
      ValueError: if pages do not divide evenly.
    """
    own_pages, rest = divmod(num_pages, len(batches))
    if rest:
        raise ValueError(
            f"Expected {num_pages=} to divide evenly among {len(batches)} batches."
        )

    def shift(batch: Batch, first_page: int) -> Batch:
        def moved(x: Array, by: int) -> Array:
            return jnp.where(x < 0, x, x + by)

        return replace(
            batch,
            slot_mapping=moved(batch.slot_mapping, first_page * page_size),
            block_table=moved(batch.block_table, first_page),
            page_copies=moved(batch.page_copies, first_page),
        )

    shifted = [shift(batch, i * own_pages) for i, batch in enumerate(batches)]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *shifted)


def check_step(
    placement: Placement | None, cache: PagedKVCache, batch: Batch | MixedBatch
) -> None:
    """Checks that a cache and a batch divide evenly over a placement.

    Raises:
      ValueError: if not.
    """
    if placement is None:
        return
    num_data, num_split = placement.num_data, placement.num_kv_splits
    num_kv_heads = cache.k_pages[0].shape[1]
    if num_kv_heads % num_split:
        raise ValueError(
            f"Expected {num_kv_heads=} to be a multiple of {num_split}, the axis "
            f"{KV_HEADS!r} of the placement: make it with `place`."
        )
    if num_data == 1:
        return
    if cache.num_pages % num_data:
        raise ValueError(
            f"Expected num_pages={cache.num_pages} to be a multiple of {num_data}, "
            f"the axis {DATA!r} of the placement."
        )
    if not isinstance(batch, Batch):
        raise ValueError(
            f"Expected a Batch over {num_data} devices of axis {DATA!r}: the parts of "
            "a MixedBatch share one row of tokens, which has no stretch of its own."
        )
    num_seqs = batch.slot_mapping.shape[0]
    if num_seqs % num_data:
        raise ValueError(
            f"Expected {num_seqs=} to be a multiple of {num_data}, the axis {DATA!r} "
            "of the placement: add empty sequences."
        )
