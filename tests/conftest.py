"""Settings every test runs under: strict promotion, and GPU tests only on a GPU."""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def on_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not on_hopper():
        skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
