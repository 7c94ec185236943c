"""Device time of jitted calls, and the ceilings that they are measured against."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def device_time_us(calls: Sequence[Callable[[], Any]], *, repeats: int = 20) -> float:
    """Measures one call's time on the device: the sum of its kernels, in us.

    On a GPU this is CUPTI's time of all kernels, without launch gaps; elsewhere the
    wall time. Calls are taken in turn, so that several of them on distinct buffers
    keep the caches cold. A call that donates its arguments keeps its own state.

    Args:
      calls: functions of no arguments that start the work and return its results.
      repeats: how many calls are timed, after one warm-up of each.

    Returns:
      The mean over the calls, in microseconds (the median on a CPU).
    """
    for call in calls:
        jax.block_until_ready(call())
    if jax.default_backend() != "gpu":
        return _wall_time_us(calls, repeats)
    # `jax.experimental.mosaic.gpu.profiler.measure` jits what it measures and calls
    # it with the same arguments again: donated pools need the layer below it.
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        results = [calls[i % len(calls)]() for i in range(repeats)]
        jax.block_until_ready(results[-1])
    finally:
        kernels = cupti._cupti_get_timings(True)
    return 1e3 * sum(milliseconds for _, milliseconds in kernels) / repeats


def _wall_time_us(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(calls[i % len(calls)]())
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def copy_ceiling_gb_per_s(num_bytes: int = 4 << 30) -> float:
    """Measures a large device copy, bytes read and written together, in GB/s."""
    x = jnp.zeros((num_bytes // 4,), jnp.float32)
    # A copy that adds, because a plain one runs on the copy engine, not in a kernel.
    copy = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / device_time_us([lambda: copy(x)], repeats=5) / 1e3
