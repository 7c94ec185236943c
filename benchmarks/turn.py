"""A benchmark's turn on the device: it lowers before, then compiles and measures.

Lowering is Python alone and takes most of the time. So the suite runs benchmarks side
by side in processes of their own, and each waits for its turn before it makes its
first array. A benchmark that runs alone has its turn at once.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

_wait: Callable[[], object] | None = None


def wait_with(wait: Callable[[], object] | None) -> None:
    """Says what blocks until it is this process's turn; None if it always is."""
    global _wait
    _wait = wait


def take() -> None:
    """Waits for this process's turn, which lasts until the process ends."""
    global _wait
    wait, _wait = _wait, None
    if wait:
        wait()


def lower(
    function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Lowered:
    """Lowers a function for arguments of some shapes, without the device.

    Args:
      function: of positional arrays and trees of them.
      *shapes: of its arguments, as `jax.eval_shape` gives them.
      donate: which arguments the caller gives up.
    """
    return jax.jit(function, donate_argnums=donate).lower(*shapes)


def make_on_host[T](make: Callable[..., T], *args: Any) -> T:
    """Calls what makes arrays from NumPy's, and gives those: the turn has no part in it."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(make(*args))


def compile_all[T](lowered: T) -> T:
    """Takes the turn and compiles a tree of what was lowered, in threads."""
    take()
    leaves, treedef = jax.tree.flatten(lowered)
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(jax.stages.Lowered.compile, leaves))
    return jax.tree.unflatten(treedef, compiled)
