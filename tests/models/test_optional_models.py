"""Larger models, named by environment variables, read ordinary English sensibly."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.full_attention import full_attention
from models.loading import load_model

TEXT = (
    "The old lighthouse stood at the end of a narrow road, where the land ran out and "
    "the sea began. Every evening the keeper climbed the stairs, lit the lamp, and "
    "watched the ships go by. He had lived there for thirty years, and he knew most of "
    "the captains by the sound of their horns. In winter the storms were so loud that "
    "he could not hear himself speak, and in summer the nights were so still that he "
    "could hear the fish jump. His daughter came to visit once a month. She brought "
    "bread, coffee, newspapers and letters, and she always asked him the same "
    "question: when would he come home? He always gave her the same answer, that this "
    "was his home, and that someone had to keep the light.\n"
)


@pytest.mark.model
@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_perplexity_is_that_of_a_working_model(family):
    variable = f"FP8KV_MODEL_{family.upper()}"
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} names no model file")
    model = load_model(path, jnp.float32)
    ids = model.tokenizer.encode(TEXT)
    token_ids = jnp.asarray([ids], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None, :]
    logits, _ = jax.jit(model.forward, static_argnames="attend")(
        model.params, token_ids, positions, attend=full_attention, carry=None
    )
    log_probabilities = np.asarray(jax.nn.log_softmax(logits[0], axis=-1))
    chosen = log_probabilities[np.arange(len(ids) - 1), ids[1:]]
    # Qwen2.5-Coder-0.5B gives 27.8 and Gemma-3-270m 15.0. One wrong part (rotary
    # order, norm offset, missing BOS) gives hundreds, random weights the vocabulary.
    assert np.exp(-chosen.mean()) < 40
    assert model.tokenizer.decode(ids) == TEXT
