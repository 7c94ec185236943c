"""Device and wall time of jitted calls, and the ceilings that they are measured against."""

import collections
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Kernels in one session of CUPTI. It ends the process when its buffer is full, which
# happened between 6,000 and 11,000.
MAX_KERNELS = 3000

type Calls = Sequence[Callable[[], Any]]
# Of one call: name and microseconds of each of its kernels.
type KernelTimes = list[tuple[str, float]]


class Times(NamedTuple):
    """Microseconds of one call: the median of several, and how far they spread."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        p10, median, p90 = np.percentile(samples, [10, 50, 90])
        return cls(float(median), float(p10), float(p90), len(samples))


def device_times(calls: Calls, *, repeats: int = 20) -> Times:
    """Measures one call's time on the device: the sum of its kernels.

    On a GPU this is CUPTI's time of all kernels, without launch gaps; elsewhere the
    wall time. Calls are taken in turn, so that several of them on distinct buffers
    keep the caches cold. A call that donates its arguments keeps its own state.

    Args:
      calls: functions of no arguments that start the work and return its results.
      repeats: how many calls are timed, after one warm-up of each.
    """
    warm_up(calls)
    if jax.default_backend() != "gpu":
        return wall_times(calls, repeats=repeats)
    timed = kernel_times(calls, repeats=repeats)
    return Times.of([sum(us for _, us in kernels) for kernels in timed])


def device_time_us(calls: Calls, *, repeats: int = 20) -> float:
    """The median of `device_times`, in microseconds."""
    return device_times(calls, repeats=repeats).median


def warm_up(calls: Calls) -> None:
    for call in calls:
        jax.block_until_ready(call())


def kernel_times(
    calls: Calls,
    *,
    repeats: int,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> list[KernelTimes]:
    """Lists the kernels of each of some calls as CUPTI saw them, on a GPU.

    Args:
      calls: taken in turn, warm.
      repeats: how many calls are timed; one more is made, to count its kernels.
      wait: blocks until a call's result is there.

    Returns:
      For each call its kernels, in the order they ended.
    """
    num_kernels = len(kernels_of(calls[:1], wait))
    at_once = max(1, MAX_KERNELS // max(1, num_kernels))
    in_turn = [calls[i % len(calls)] for i in range(repeats)]
    timed: list[KernelTimes] = []
    for group in itertools.batched(in_turn, at_once):
        seen = kernels_of(group, wait)
        each, rest = divmod(len(seen), len(group))
        if each and not rest:
            timed += [list(kernels) for kernels in itertools.batched(seen, each)]
        else:  # calls of different numbers of kernels: a session of its own for each
            timed += [kernels_of([call], wait) for call in group]
    return timed


def kernels_of(
    calls: Calls, wait: Callable[[Any], Any] = jax.block_until_ready
) -> KernelTimes:
    """Lists the kernels of all calls together, in one session of CUPTI."""
    # `jax.experimental.mosaic.gpu.profiler.measure` jits what it measures and calls
    # it with the same arguments again: donated pools need the layer below it.
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        for call in calls:
            result = call()
        wait(result)
    finally:
        kernels = cupti._cupti_get_timings(True)
    return [(name, 1e3 * milliseconds) for name, milliseconds in kernels]


def wall_times(calls: Calls, *, repeats: int = 20) -> Times:
    """Measures the wall time of one call, warm, from its start to its result.

    Args:
      calls: taken in turn.
      repeats: how many calls are timed.
    """
    samples = []
    for i in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(calls[i % len(calls)]())
        samples.append(1e6 * (time.perf_counter() - started))
    return Times.of(samples)


def steady_times(
    call: Callable[[], Any], *, repeats: int = 40, in_flight: int = 2
) -> Times:
    """Measures the time from one result to the next while further calls are under way.

    What a loop takes that reads each result while the next calls run: how long the
    first call takes to reach the device is not in it.

    Args:
      call: warm.
      repeats: how many intervals are timed.
      in_flight: calls that are started before a result is waited for.
    """
    pending: collections.deque[Any] = collections.deque()
    stamps = []
    for _ in range(in_flight + repeats + 1):
        pending.append(call())
        if len(pending) > in_flight:
            jax.block_until_ready(pending.popleft())
            stamps.append(1e6 * time.perf_counter())
    return Times.of(np.diff(stamps).tolist())


class Ceilings(NamedTuple):
    """What this device does at best, measured: a large copy, a large BF16 product."""

    gb_per_s: float
    tflop_per_s: float


def measure_ceilings() -> Ceilings:
    """Measures both, on sizes that suit the device."""
    on_gpu = jax.default_backend() == "gpu"
    return Ceilings(
        gb_per_s=copy_ceiling_gb_per_s(4 << 30 if on_gpu else 64 << 20),
        tflop_per_s=matmul_ceiling_tflop_per_s(8192 if on_gpu else 512),
    )


def copy_ceiling_gb_per_s(num_bytes: int = 4 << 30) -> float:
    """Measures a large device copy, bytes read and written together, in GB/s."""
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    # A copy that adds, because a plain one runs on the copy engine, not in a kernel.
    copy = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / device_time_us([lambda: copy(x)], repeats=5) / 1e3


def matmul_ceiling_tflop_per_s(size: int = 8192) -> float:
    """Measures a large product of BF16 matrices, in TFLOP/s."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(jnp.dot)
    return 2 * size**3 / device_time_us([lambda: multiply(x, x)], repeats=5) / 1e6
