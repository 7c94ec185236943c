"""What several tests of this folder share."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """Compiles with few optimizations: where compiling takes longer than running.

    On a CPU alone: optimizations of a GPU are what some tests are about.
    """
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, before or jax.default_backend() == "cpu")
    yield
    jax.config.update(name, before)
