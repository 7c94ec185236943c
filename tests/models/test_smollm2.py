"""SmolLM2 from its GGUF file against an independent implementation's figures.

`data/smollm2_reference.npz` and `.json` hold token ids, the 20 largest
log-probabilities of every position of four texts, and two greedy continuations, all
computed in float32 by another implementation of the model.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.full_attention import full_attention
from models.loading import ModelFileError, default_model_path, load_model

TEXTS = ("english", "code", "chinese", "symbols")
# The longest text has 196 tokens; padding all to one length compiles once.
PADDED_TEXT = 200
PADDED_GREEDY = 64


@pytest.fixture(scope="module")
def model():
    path = default_model_path()
    assert path is not None, "the dev group installs the demo model"
    return load_model(path, jnp.float32)


@pytest.fixture(scope="module")
def forward(model):
    return jax.jit(model.forward, static_argnames="attend")


@pytest.fixture(scope="module")
def texts(data):
    return json.loads((data / "smollm2_reference.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reference(data):
    with np.load(data / "smollm2_reference.npz") as file:
        return dict(file)


def run(forward, model, ids, padded, logits_at=None):
    token_ids = jnp.asarray([ids + [0] * (padded - len(ids))], jnp.int32)
    positions = jnp.arange(padded, dtype=jnp.int32)[None, :]
    logits, _ = forward(
        model.params,
        token_ids,
        positions,
        attend=full_attention,
        carry=None,
        logits_at=logits_at,
    )
    return logits[0]


@pytest.mark.parametrize("name", [*TEXTS, "chat", "story"])
def test_token_ids_equal_the_reference(name, model, texts, reference):
    text = texts[name]["text"]
    ids = model.tokenizer.encode(text)
    assert ids == reference[f"{name}.ids"].tolist()
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", TEXTS)
def test_log_probabilities_equal_the_reference(name, model, forward, reference):
    ids = reference[f"{name}.ids"].tolist()
    logits = run(forward, model, ids, PADDED_TEXT)[: len(ids)]
    log_probabilities = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    top_ids = reference[f"{name}.top_ids"]
    found = np.take_along_axis(log_probabilities, top_ids, axis=-1)
    # Two independent float32 implementations agree to 6e-5; TF32 products, BF16
    # anywhere, or interleaved rotary pairs miss by far more.
    np.testing.assert_allclose(found, reference[f"{name}.top_logprobs"], atol=2e-4)


def test_the_chat_template_gives_the_reference_prompt(model, texts):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert model.tokenizer.apply_chat_template(messages) == texts["chat"]["text"]


@pytest.mark.parametrize("name", ["chat", "story"])
def test_greedy_continuations_equal_the_reference(
    name, model, forward, texts, reference
):
    ids = reference[f"{name}.ids"].tolist()
    wanted = reference[f"{name}.greedy_ids"].tolist()
    for _ in wanted:
        last = jnp.asarray([len(ids) - 1], jnp.int32)
        logits = run(forward, model, ids, PADDED_GREEDY, logits_at=last)
        ids.append(int(jnp.argmax(logits)))
    new = ids[-len(wanted) :]
    assert new == wanted
    shown = model.tokenizer.decode(new, skip_special_tokens=False)
    assert shown == texts[name]["greedy_text"]
    assert (new[-1] in model.tokenizer.eos_ids) == (name == "chat")


def test_the_configuration_is_smollm2(model):
    config = model.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (
        30,
        576,
        49152,
    )
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied_head
    assert config.max_context == 8192
    assert {rope.base for rope in config.ropes} == {1e5}


def test_half_of_the_real_file_is_refused(tmp_path):
    whole = default_model_path()
    half = tmp_path / "half.gguf"
    with whole.open("rb") as file:
        half.write_bytes(file.read(whole.stat().st_size // 2))
    with pytest.raises(ModelFileError, match=r"half.gguf: cut off or damaged"):
        load_model(half, jnp.float32)
