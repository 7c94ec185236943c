"""A model whose projections are joined computes what it did."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8kv_jax.cli.devices import load_on
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.options import ComputeDtype
from models.full_attention import full_attention
from models.fusion import fuse_projections, split_projections
from models.transformer import abstract_model, bind_forward

DATA = Path(__file__).parent / "data"
TOKEN_IDS = np.arange(1, 13).reshape(2, 6)


def fuse(model):
    """Joins a copy of the parameters' dicts: the layers are taken out of them."""
    return fuse_projections(model.config, jax.tree.map(lambda x: x, model.params))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fused_projections_give_the_same_logits(tiny_models, logits_of, family):
    model = tiny_models[family]
    expected = logits_of(model, TOKEN_IDS)
    graphdef, params = fuse(model)
    positions = jnp.broadcast_to(jnp.arange(6)[None, :], (2, 6))
    actual, _ = jax.jit(bind_forward(graphdef), static_argnames="attend")(
        params, jnp.asarray(TOKEN_IDS), positions, attend=full_attention, carry=None
    )
    # Float32 sums of at most 64 terms in another order, through the layers.
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_fused_projections_keep_every_weight_once(tiny_models):
    model = tiny_models["qwen2"]
    _, params = fuse(model)
    _, expected = abstract_model(model.config, jnp.float32, fused=True)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)

    def count(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    assert count(params) == count(model.params)
    attention = params["layers"][0]["attention"]
    parts = [model.params["layers"][0]["attention"][name]["bias"] for name in "qkv"]
    np.testing.assert_array_equal(attention["qkv"]["bias"], np.concatenate(parts))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_fused_projections_come_apart_again(tiny_models, family):
    model = tiny_models[family]
    _, params = fuse(model)
    split = split_projections(model.config, params)
    jax.tree.map(np.testing.assert_array_equal, split, model.params)


def test_fusing_takes_the_layers_out(tiny_models):
    params = jax.tree.map(lambda x: x, tiny_models["llama"].params)
    fuse_projections(tiny_models["llama"].config, params)
    assert not params["layers"]


def test_a_command_on_one_gpu_joins_projections(tiny_models, logits_of, monkeypatch):
    model = tiny_models["qwen2"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    fused, _ = load_on(1, DATA / "tiny_qwen2", ComputeDtype.FLOAT32)
    assert "qkv" in fused.params["layers"][0]["attention"]
    assert identify(fused) == identify(model)
    # As above: sums in another order.
    np.testing.assert_allclose(
        logits_of(fused, TOKEN_IDS), logits_of(model, TOKEN_IDS), rtol=1e-4, atol=1e-4
    )


def test_a_command_on_a_cpu_keeps_projections_apart(tiny_models):
    kept, _ = load_on(1, DATA / "tiny_llama", ComputeDtype.FLOAT32)
    jax.tree.map(
        np.testing.assert_array_equal, kept.params, tiny_models["llama"].params
    )
