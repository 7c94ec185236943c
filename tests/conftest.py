"""Settings every test runs under: strict promotion, and GPU tests only on a GPU."""

import os
import tempfile

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_FOLDER = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what was compiled for the tests, workers and processes of this session.

    The demo model's steps take most of their tests' time, and each test and command
    line jits its own.
    """
    if _FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fp8kv-compiled-")
        config.add_cleanup(folder.cleanup)
        os.environ[_FOLDER] = folder.name
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    # JAX was imported, and read its variables, before.
    jax.config.update("jax_compilation_cache_dir", os.environ[_FOLDER])
    seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def on_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not on_hopper():
        skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
