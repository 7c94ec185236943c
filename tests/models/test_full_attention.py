"""The cache-free attention against loops over queries and keys."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.full_attention import full_attention


def loop_attention(q, k, v, scale, window, cap):
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for seq, query, head in np.ndindex(q.shape[:3]):
        first = 0 if window is None else max(0, query + 1 - window)
        scores = []
        for key in range(first, query + 1):
            score = float(q[seq, query, head] @ k[seq, key, head // group]) * scale
            scores.append(score if cap is None else cap * math.tanh(score / cap))
        weights = np.exp(np.asarray(scores) - max(scores))
        weights /= weights.sum()
        out[seq, query, head] = weights @ v[seq, first : query + 1, head // group]
    return out


def random_qkv(dtype=np.float64, num_q_heads=6, num_kv_heads=2):
    rng = np.random.default_rng(1)
    shapes = ((2, 7, num_q_heads, 4), (2, 7, num_kv_heads, 4), (2, 7, num_kv_heads, 4))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("window", "cap"), [(None, None), (1, None), (3, None), (None, 1.5), (3, 1.5)]
)
def test_it_equals_a_loop(num_kv_heads, window, cap):
    q, k, v = random_qkv(num_kv_heads=num_kv_heads)
    wanted = loop_attention(q, k, v, 0.7, window, cap)
    out, carry = full_attention(
        "carry",
        0,
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        softmax_scale=0.7,
        sliding_window=window,
        logit_soft_cap=cap,
    )
    assert carry == "carry"
    # Sums of at most 7 terms of size 3 in float32: a few times 3 * 2^-24.
    np.testing.assert_allclose(out, wanted, atol=2e-6)


def test_padding_behind_a_text_changes_nothing_before_it():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in random_qkv())
    options = {"softmax_scale": 1.0, "sliding_window": None, "logit_soft_cap": None}
    out, _ = full_attention(None, 0, q, k, v, **options)
    junk = [x.at[:, 5:].set(1e4) for x in (q, k, v)]
    other, _ = full_attention(None, 0, *junk, **options)
    np.testing.assert_array_equal(out[:, :5], other[:, :5])
    assert not np.allclose(out[:, 5:], other[:, 5:])


def test_bfloat16_comes_back_as_bfloat16_within_its_rounding():
    q, k, v = random_qkv()
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out, _ = full_attention(
        None,
        0,
        *rounded,
        softmax_scale=0.5,
        sliding_window=None,
        logit_soft_cap=None,
    )
    wanted = loop_attention(
        *(np.asarray(x, np.float64) for x in rounded), 0.5, None, None
    )
    assert out.dtype == jnp.bfloat16
    # All inside is float32, so one rounding is left: half an ulp, 2^-9 relative.
    np.testing.assert_allclose(
        np.asarray(out, np.float64), wanted, rtol=2**-8, atol=1e-5
    )
