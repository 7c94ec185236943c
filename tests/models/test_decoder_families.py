"""The decoder against transformers, on tiny models of each family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.full_attention import full_attention
from models.loading import LoadedModel
from models.rope import Rope
from models.transformer import bind_forward, random_model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")

# Two float32 implementations differ by the rounding of their sums: some 20 sums one
# after another, each over up to 64 terms and with a relative error of a few epsilon
# times sqrt(64), give 20 * 8 * 2^-24 ~ 1e-5 of the largest logit. Twice that:
RELATIVE_TOLERANCE = 2e-5


def expected(data, name):
    with np.load(data / f"tiny_{name}" / "expected.npz") as file:
        return file["token_ids"], file["logits"]


def error(logits, wanted):
    return np.max(np.abs(logits - wanted)) / np.max(np.abs(wanted))


def with_config(model: LoadedModel, **changes) -> LoadedModel:
    """The same parameters in a model whose configuration differs."""
    config = dataclasses.replace(model.config, **changes)
    graphdef, _ = random_model(config, seed=0, dtype=jnp.float32)
    return dataclasses.replace(model, config=config, graphdef=graphdef)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name, data, tiny_models, logits_of):
    token_ids, wanted = expected(data, name)
    logits = logits_of(tiny_models[name], token_ids)
    assert logits.dtype == np.float32
    assert error(logits, wanted) < RELATIVE_TOLERANCE


LONG = (None, None, None)
ONE_ROPE = (Rope(base=1e6),) * 3
MISTAKES = {
    "llama_rope_scaling": ("llama", {"ropes": (Rope(base=100.0),) * 2}),
    "llama_softmax_scale": ("llama", {"softmax_scale": 1.0}),
    "qwen2_rope_base": ("qwen2", {"ropes": (Rope(base=1e4 + 1e3),) * 2}),
    "qwen3_eps": ("qwen3", {"rms_norm_eps": 1e-3}),
    "gemma2_attention_cap": ("gemma2", {"attention_soft_cap": None}),
    "gemma2_logit_cap": ("gemma2", {"logit_soft_cap": None}),
    "gemma2_window_off_by_one": ("gemma2", {"sliding_windows": (6, None)}),
    "gemma2_window_on_other_layer": ("gemma2", {"sliding_windows": (None, 5)}),
    "gemma3_no_window": ("gemma3", {"sliding_windows": LONG}),
    "gemma3_ropes": ("gemma3", {"ropes": ONE_ROPE}),
    "gemma3_softmax_scale": ("gemma3", {"softmax_scale": 16**-0.5}),
    "gemma3_activation": ("gemma3", {"activation": "silu"}),
    "gemma3_embedding_scale": ("gemma3", {"embedding_scale": 1.0}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tolerance_catches_a_wrong_configuration(
    mistake, data, tiny_models, logits_of
):
    name, changes = MISTAKES[mistake]
    token_ids, wanted = expected(data, name)
    logits = logits_of(with_config(tiny_models[name], **changes), token_ids)
    assert error(logits, wanted) > 10 * RELATIVE_TOLERANCE


def test_logits_at_picks_one_position_per_sequence(data, tiny_models, logits_of):
    token_ids, _ = expected(data, "gemma2")
    model = tiny_models["gemma2"]
    everywhere = logits_of(model, token_ids)
    picked = logits_of(model, token_ids, logits_at=jnp.asarray([3, 20], jnp.int32))
    assert picked.shape == (2, model.config.vocab_size)
    # The head multiplies fewer rows, which may reorder its sums of 32 terms.
    wanted = np.stack([everywhere[0, 3], everywhere[1, 20]])
    np.testing.assert_allclose(picked, wanted, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_parameters_compute_in_bfloat16(name, data, tiny_models):
    model = tiny_models[name]
    token_ids, wanted = expected(data, name)
    params = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, model.params
    )
    seen = []

    def attend(carry, layer_index, q, k, v, **options):
        seen.extend([q.dtype, k.dtype, v.dtype])
        return full_attention(carry, layer_index, q, k, v, **options)

    biases_too = jax.tree.map_with_path(
        lambda path, x: x.astype(jnp.bfloat16) if path[-1].key == "bias" else x, params
    )
    positions = jnp.arange(24, dtype=jnp.int32)[None, :]
    logits, _ = model.forward(
        biases_too, jnp.asarray(token_ids[:1]), positions, attend, None
    )
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32
    # bfloat16 rounds to 2^-9; the same 20 steps give 20 * 2^-9 ~ 4 %. Twice that.
    assert error(np.asarray(logits), wanted[:1]) < 0.08


def test_attend_gets_each_layer_with_its_options_and_the_carry(tiny_models):
    model = tiny_models["gemma3"]
    calls = []

    def attend(carry, layer_index, q, k, v, **options):
        calls.append((layer_index, q.shape, k.shape, v.shape, options))
        return q, carry + 1

    ids = jnp.zeros((2, 3), jnp.int32)
    positions = jnp.zeros((2, 3), jnp.int32)
    _, carry = model.forward(model.params, ids, positions, attend, 10)
    assert carry == 13
    scale = 12**-0.5
    for layer_index, window in enumerate((5, None, 5)):
        options = {
            "softmax_scale": scale,
            "sliding_window": window,
            "logit_soft_cap": None,
        }
        q, kv = (2, 3, 4, 16), (2, 3, 2, 16)
        assert calls[layer_index] == (layer_index, q, kv, kv, options)


def test_keys_depend_on_positions_and_values_do_not(tiny_models):
    model = tiny_models["llama"]
    seen = []

    def attend(carry, layer_index, q, k, v, **options):
        if layer_index == 0:
            seen.append((k, v))
        return q, carry

    ids = jnp.asarray([[7]], jnp.int32)
    for position in (0, 9):
        model.forward(
            model.params, ids, jnp.full((1, 1), position, jnp.int32), attend, None
        )
    (k0, v0), (k9, v9) = seen
    assert not np.allclose(k0, k9)
    np.testing.assert_array_equal(v0, v9)
    # A rotation keeps lengths; float32 rounds them by a few parts in 1e7.
    np.testing.assert_allclose(jnp.linalg.norm(k0), jnp.linalg.norm(k9), rtol=1e-6)


def test_float32_products_ask_for_full_precision(tiny_models):
    model = tiny_models["qwen2"]
    ids = jnp.zeros((1, 2), jnp.int32)
    jaxpr = jax.make_jaxpr(
        lambda params: model.forward(params, ids, ids, full_attention, None)[0]
    )(model.params)
    precisions = [
        equation.params["precision"]
        for equation in _equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    # 7 projections and 2 products of the attention in each layer, and the head.
    assert len(precisions) == 2 * 9 + 1
    highest = jax.lax.Precision.HIGHEST
    assert all(precision == (highest, highest) for precision in precisions)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _equations(value.jaxpr)


def test_a_random_model_runs_and_depends_on_its_seed(tiny_models):
    config = tiny_models["qwen3"].config
    ids = jnp.arange(4, dtype=jnp.int32)[None, :]
    results = []
    for seed in (0, 0, 1):
        graphdef, params = random_model(config, seed=seed, dtype=jnp.float32)
        forward = bind_forward(graphdef)
        results.append(np.asarray(forward(params, ids, ids, full_attention, None)[0]))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.allclose(results[0], results[2])
