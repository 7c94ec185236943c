"""absmax against NumPy."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.absmax import absmax
from pallas_kernels.absmax.cases import CASES, make_inputs


def amax_with_numpy(x, real, *, per_head: bool = True) -> np.ndarray:
    size = np.abs(np.asarray(x, np.float32))[np.asarray(real)]
    size = np.where(np.isfinite(size), size, 0)
    axes = (0, 2) if per_head else None
    return np.max(size, axis=axes, initial=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("per_head", [True, False])
def test_amax_is_over_finite_values_of_real_tokens(case, per_head):
    inputs = make_inputs(case, 1)
    actual = absmax(*inputs, per_head=per_head)
    assert actual.shape == ((case.num_kv_heads,) if per_head else ())
    np.testing.assert_array_equal(actual, amax_with_numpy(*inputs, per_head=per_head))


def test_without_a_mask_all_tokens_take_part():
    x = jnp.array([[[1.0], [-2.0]], [[-3.0], [0.5]]])
    assert absmax(x).tolist() == [3.0, 2.0]


def test_nan_and_inf_never_enter():
    # docs/cases.md row 11: one Inf element.
    x = jnp.array([[[1.0, jnp.inf, jnp.nan, -jnp.inf, -2.0]]])
    assert absmax(x).tolist() == [2.0]


def test_a_huge_other_tensor_does_not_enter():
    # docs/cases.md row 15 and its neighbour: what is not passed, and what is padding.
    x = jnp.array([[[1.0]], [[1e30]]])
    assert absmax(x, jnp.array([True, False])).tolist() == [1.0]


def test_nothing_gives_zero():
    x = jnp.full((2, 3, 4), jnp.nan)
    assert absmax(x).tolist() == [0, 0, 0]
    assert absmax(jnp.ones((2, 3, 4)), jnp.zeros(2, bool)).tolist() == [0, 0, 0]


def test_subnormals_are_taken_for_zero():
    x = jnp.full((1, 1, 4), 1e-39)
    assert absmax(x).tolist() == [0]
    assert absmax(jnp.full((1, 1, 4), 2.0**-126)).tolist() == [2.0**-126]


@given(st.permutations(range(6)))
@settings(max_examples=20, deadline=None)
def test_a_running_amax_does_not_depend_on_the_order_of_batches(order):
    batches = np.random.default_rng(0).standard_normal((6, 4, 2, 8), np.float32)
    running = jnp.zeros(2)
    for i in order:
        running = jnp.maximum(running, absmax(jnp.asarray(batches[i])))
    whole = absmax(jnp.asarray(batches.reshape(24, 2, 8)))
    np.testing.assert_array_equal(running, whole)


@pytest.mark.parametrize(
    ("x", "real", "message"),
    [
        (jnp.ones((2, 3)), None, "to be [num_tokens, num_kv_heads, head_dim]"),
        (jnp.ones((0, 3, 4)), None, "and not empty"),
        (jnp.ones((2, 3, 4), jnp.int32), None, "bfloat16 or float32, got int32"),
        (jnp.ones((2, 3, 4)), jnp.ones(3, bool), "bool of shape (2,)"),
        (jnp.ones((2, 3, 4)), jnp.ones(2), "got float32 of shape (2,)"),
    ],
)
def test_disagreeing_arguments_are_an_error(x, real, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        absmax(x, real)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("per_head", [True, False])
def test_the_gpu_gives_the_same_bits(case, per_head):
    inputs = make_inputs(case, 3)
    actual = absmax(*inputs, per_head=per_head)
    np.testing.assert_array_equal(actual, amax_with_numpy(*inputs, per_head=per_head))
