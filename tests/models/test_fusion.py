"""A model whose projections are joined computes what it did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.full_attention import full_attention
from models.fusion import fuse_projections
from models.transformer import abstract_model, bind_forward

TOKEN_IDS = np.arange(1, 13).reshape(2, 6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fused_projections_give_the_same_logits(tiny_models, logits_of, family):
    model = tiny_models[family]
    expected = logits_of(model, TOKEN_IDS)
    graphdef, params = fuse_projections(model.config, model.params)
    positions = jnp.broadcast_to(jnp.arange(6)[None, :], (2, 6))
    actual, _ = jax.jit(bind_forward(graphdef), static_argnames="attend")(
        params, jnp.asarray(TOKEN_IDS), positions, attend=full_attention, carry=None
    )
    # Float32 sums of at most 64 terms in another order, through the layers.
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_fused_projections_keep_every_weight_once(tiny_models):
    model = tiny_models["qwen2"]
    _, params = fuse_projections(model.config, model.params)
    _, expected = abstract_model(model.config, jnp.float32, fused=True)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)

    def count(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    assert count(params) == count(model.params)
    attention = params["layers"][0]["attention"]
    parts = [model.params["layers"][0]["attention"][name]["bias"] for name in "qkv"]
    np.testing.assert_array_equal(attention["qkv"]["bias"], np.concatenate(parts))
