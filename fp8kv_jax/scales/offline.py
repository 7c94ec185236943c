"""Offline calibration: runs samples through the model and folds what K and V show.

Every device runs whole batches of the plan by one and the same program, so a sample
meets the same neighbours and the same shapes however many devices there are.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32

from fp8kv_jax import counters as counter
from fp8kv_jax.decode import Forward
from fp8kv_jax.scales.running_state import StateStore
from fp8kv_jax.scales.sample_plan import BatchSpec, SamplePlan
from fp8kv_jax.scales.statistics import AmaxState, merge
from pallas_kernels.fp8 import RowStatistics, row_statistics

type Attend = Callable[..., tuple[Array, Any]]
type ObserveStep = Callable[[Any, "Totals", Array, Array], "Totals"]

_AXIS = "data"


class Compiling(NamedTuple):
    """A batch of a new shape comes next."""

    num_rows: int
    length: int


class Observed(NamedTuple):
    """How far the run is: samples and tokens observed, an earlier run's included."""

    num_samples: int
    num_tokens: int


type Event = Compiling | Observed


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What each device observed since the totals were last gathered."""

    k_amax: Float32[Array, "num_devices num_layers num_kv_heads"]
    v_amax: Float32[Array, "num_devices num_layers num_kv_heads"]
    k_nonfinite: counter.Counter
    v_nonfinite: counter.Counter


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class _Carry:
    """Passes through the model's layers beside the activations."""

    real: Bool[Array, "num_tokens"]
    totals: Totals


def observing(attend: Attend) -> Attend:
    """Wraps an attention without a cache so that it folds K and V into its carry.

    K and V are observed as the cache would store them, rounded to BF16. What the
    wrapped attention sees is not rounded.
    """

    def observe(
        carry: _Carry,
        layer: int,
        q: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
        k: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
        v: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
        **options: Any,
    ) -> tuple[Array, _Carry]:
        out, _ = attend(None, layer, q, k, v, **options)
        k_seen, v_seen = _statistics(k, carry.real), _statistics(v, carry.real)
        return out, replace(carry, totals=_fold(carry.totals, layer, k_seen, v_seen))

    return observe


def _statistics(
    x: Float[Array, "num_seqs num_queries num_kv_heads head_dim"],
    real: Bool[Array, "num_tokens"],
) -> RowStatistics:
    # The barrier keeps XLA from deleting the rounding (`xla_allow_excess_precision`).
    rows = lax.optimization_barrier(x.reshape(-1, *x.shape[2:]).astype(jnp.bfloat16))
    return row_statistics(rows, jnp.ones(x.shape[2], jnp.float32), real)


def _fold(totals: Totals, layer: int, k: RowStatistics, v: RowStatistics) -> Totals:
    def count(old: counter.Counter, new: Int32[Array, "num_kv_heads"]):
        return old.at[0, layer].set(counter.add(old[0, layer], new))

    return Totals(
        k_amax=totals.k_amax.at[0, layer].max(k.amax),
        v_amax=totals.v_amax.at[0, layer].max(v.amax),
        k_nonfinite=count(totals.k_nonfinite, k.num_nonfinite),
        v_nonfinite=count(totals.v_nonfinite, v.num_nonfinite),
    )


@functools.lru_cache(maxsize=8)  # several runs of one model compile once
def make_observe_step(forward: Forward, attend: Attend, mesh: Mesh) -> ObserveStep:
    """Makes the jitted step: one batch on each device, no communication.

    Args:
      forward: the model.
      attend: its attention without a cache.
      mesh: the devices, on one axis.

    Returns:
      `(params, totals, token_ids, lengths) -> totals`, where `token_ids` is
      `[num_devices, num_rows, length]` and `lengths` says how much of a row is real.
      Padding is never observed.
    """
    observe = observing(attend)

    def run(
        params: Any,
        totals: Totals,
        token_ids: Int32[Array, "1 num_rows length"],
        lengths: Int32[Array, "1 num_rows"],
    ) -> Totals:
        positions = jnp.arange(token_ids.shape[2], dtype=jnp.int32)
        real = positions[None, :] < lengths[0][:, None]
        carry = _Carry(real=real.reshape(-1), totals=totals)
        positions = jnp.broadcast_to(positions[None, :], token_ids.shape[1:])
        # Logits of one token, and not even those: nobody reads them.
        at = jnp.zeros(token_ids.shape[1], jnp.int32)
        _, carry = forward(
            params, token_ids[0], positions, observe, carry, logits_at=at
        )
        return carry.totals

    spread = PartitionSpec(_AXIS)
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), spread, spread, spread),
            out_specs=spread,
            check_vma=False,
        )
    )


class OfflineCalibration:
    """A run over a plan, on all devices of all processes.

    Every process makes the same object and runs it to the end: they meet whenever
    totals are gathered.

    Args:
      forward: the model.
      params: its parameters; copied to every device.
      attend: its attention without a cache.
      plan: what to run.
      batch_size: sequences of the longest length that a device takes at once.
      state: what was observed before; `init_state` of a new run.
      store: where to save the state, None for nowhere.
      batches_per_save: batches of a device between two saves.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        attend: Attend,
        plan: SamplePlan,
        *,
        batch_size: int,
        state: AmaxState,
        store: StateStore | None = None,
        batches_per_save: int = 8,
    ) -> None:
        if batch_size < 1 or batches_per_save < 1:
            raise ValueError(
                "Expected batch_size >= 1 and batches_per_save >= 1, got "
                f"{batch_size} and {batches_per_save}."
            )
        self.state = state
        self.plan = plan
        self._store = store
        self._batches_per_save = batches_per_save
        self._specs = plan.batches(batch_size)
        self._mesh = Mesh(np.array(jax.devices()), (_AXIS,))
        self._spread = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        replicated = NamedSharding(self._mesh, PartitionSpec())
        self._params = jax.tree.map(lambda x: _replicate(x, replicated), params)
        self._step = make_observe_step(forward, attend, self._mesh)
        self._gather = jax.jit(_same, out_shardings=replicated)

    def run(self) -> Generator[Event]:
        """Observes what is left of the plan; `state` is complete at the end.

        At most two batches of a device are under way: the host holds no more.
        """
        totals, before, pending, shape = self._no_totals(), None, [], None
        done = int(self.state.next_batch)
        while done < len(self._specs):
            group = self._next_group(done)
            if (group[0].num_rows, group[0].length) != shape:
                shape = (group[0].num_rows, group[0].length)
                yield Compiling(*shape)
            totals = self._step(self._params, totals, *self._batch(group))
            jax.block_until_ready(before)
            before = totals
            done, pending = done + len(group), [*pending, group]
            if len(pending) == self._batches_per_save or done == len(self._specs):
                self._absorb(totals, [spec for group in pending for spec in group])
                totals, before, pending = self._no_totals(), None, []
                yield self._observed([])
            else:
                yield self._observed(pending[:-1])

    def _next_group(self, first: int) -> Sequence[BatchSpec]:
        """The next batches of one shape, at most one for each device."""
        group = self._specs[first : first + self._mesh.size]
        return [spec for spec in group if spec.length == group[0].length]

    def _batch(self, group: Sequence[BatchSpec]) -> list[jax.Array]:
        """Places a group's batches; a device without one gets rows of length 0."""
        num_rows, length = group[0].num_rows, group[0].length
        empty = BatchSpec(num_rows=num_rows, length=length, samples=())
        size = self._mesh.size

        def place(part: int, *shape: int) -> jax.Array:
            def rows_of(index: Any) -> np.ndarray:
                device = index[0].start or 0  # slice(None) if it is the only one
                spec = group[device] if device < len(group) else empty
                return self.plan.build(spec)[part][None]

            return jax.make_array_from_callback(
                (size, *shape), self._spread, rows_of, dtype=jnp.int32
            )

        return [place(0, num_rows, length), place(1, num_rows)]

    def _no_totals(self) -> Totals:
        def zeros(dtype: Any, *trailing: int) -> jax.Array:
            shape = (self._mesh.size, *self.state.k_amax.shape, *trailing)
            return jax.make_array_from_callback(
                shape,
                self._spread,
                lambda index: np.zeros((1, *shape[1:]), dtype),
                dtype=dtype,
            )

        return Totals(
            k_amax=zeros(jnp.float32),
            v_amax=zeros(jnp.float32),
            k_nonfinite=zeros(jnp.uint32, 2),
            v_nonfinite=zeros(jnp.uint32, 2),
        )

    def _absorb(self, totals: Totals, specs: Sequence[BatchSpec]) -> None:
        """Gathers what all devices observed into the state, and saves it."""
        seen = jax.device_get(self._gather(totals))
        num_tokens, num_samples = self.plan.count(specs)
        new = replace(
            self.state,
            k_amax=seen.k_amax.max(axis=0),
            v_amax=seen.v_amax.max(axis=0),
            k_nonfinite=counter.total(seen.k_nonfinite).sum(axis=0),
            v_nonfinite=counter.total(seen.v_nonfinite).sum(axis=0),
            num_tokens=num_tokens,
            num_samples=num_samples,
            next_batch=self.state.next_batch + np.int64(len(specs)),
        )
        self.state = merge(self.state, new)
        if self._store is not None:
            self._store.save(self.state)

    def _observed(self, pending: Sequence[Sequence[BatchSpec]]) -> Observed:
        num_tokens, num_samples = self.plan.count([s for g in pending for s in g])
        return Observed(
            num_samples=int(self.state.num_samples.sum() + num_samples.sum()),
            num_tokens=int(self.state.num_tokens.sum() + num_tokens.sum()),
        )


def _same(totals: Totals) -> Totals:
    return totals


def _replicate(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copies a parameter to every device, of other processes too.

    Each process has loaded it for itself: nothing is sent or compared.
    """
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )
