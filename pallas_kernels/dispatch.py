"""Which implementation serves a call: names, device predicates, the try-in-turn loop."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

type Implementation = Literal["mosaic_gpu", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("mosaic_gpu", "xla")


def dispatch(
    candidates: Mapping[Implementation, Callable[..., Any]],
    implementation: Implementation | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the implementation asked for, or the best one that serves the call.

    Args:
      candidates: implementations by name, best first.
      implementation: a name, or None for the first that works on this device.
      *args: passed on.
      **kwargs: passed on.

    Raises:
      ValueError: if there is no implementation of that name.
      NotImplementedError: if the one asked for cannot serve this call.
      ExceptionGroup: if none can, with each reason.
    """
    if implementation is not None:
        if implementation not in candidates:
            raise ValueError(
                f"Expected implementation to be None or one of {list(candidates)}, "
                f"got {implementation!r}."
            )
        return candidates[implementation](*args, **kwargs)
    reasons: list[Exception] = []
    for name, candidate in candidates.items():
        if name == "mosaic_gpu" and not targets_hopper():
            continue
        try:
            return candidate(*args, **kwargs)
        except NotImplementedError as reason:
            reasons.append(reason)
    raise ExceptionGroup("No implementation serves this call", reasons)


def lazily(module: str, name: str) -> Callable[..., Any]:
    """Names a function of a module that is imported when the function is called.

    Mosaic takes seconds to import, and only a GPU needs it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


def targets_hopper() -> bool:
    """Says whether code traced now is for an NVIDIA GPU of compute capability 9.0."""
    device = _target()
    if isinstance(device, jax.sharding.AbstractDevice):
        return device.device_kind.startswith(("NVIDIA H100", "NVIDIA H200"))
    return device.platform == "gpu" and device.compute_capability == "9.0"


def device_kind() -> str:
    """Names the kind of device that code traced now is for."""
    return _target().device_kind


def _target() -> jax.Device | jax.sharding.AbstractDevice:
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device
