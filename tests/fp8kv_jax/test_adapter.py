"""docs/adapter: our cache inside a decode loop that knows nothing of it."""

import difflib
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8kv_jax as fp8kv
from fp8kv_jax import counters

FOLDER = pathlib.Path(__file__).parent.parent.parent / "docs/adapter"
BEFORE, AFTER = FOLDER / "gemma_loop.py", FOLDER / "gemma_loop_fp8.py"
PROMPT_LEN, NUM_STEPS = 9, 30


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode(path):
    """Runs a loop: its tokens, logits [steps, batch, words] and last cache."""
    loop = load(path)
    cfg = loop.GemmaConfig()
    model = loop.Gemma(cfg, nnx.Rngs(0))
    prompt = jax.random.randint(jax.random.key(1), (2, PROMPT_LEN), 0, cfg.num_embed)
    cache = loop.init_cache(cfg, 2)
    return loop.sample(model, prompt, cache, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def loops():
    return decode(BEFORE), decode(AFTER)


def changed_lines():
    """Lines that one file or the other has in the places where they differ."""
    before, after = (path.read_text().splitlines() for path in (BEFORE, AFTER))
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(
        max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal"
    )


def test_the_change_is_at_most_forty_lines():
    assert 3 <= changed_lines() <= 40


def test_the_scales_freeze_inside_the_loop(loops):
    _, (_, _, (cache, state)) = loops
    assert state.frozen
    # The window of 48 ends on a step of the scan: 18 of the prompt, 2 of each after.
    assert int(state.tokens_seen) == 48
    assert int(state.num_requantized) == 48
    assert cache.k_pages[0].dtype.itemsize == 1
    for tally in (state.k_tally, state.v_tally):
        assert counters.total(tally.saturated).sum() == 0


def test_tokens_and_logits_are_those_of_the_dense_cache(loops):
    (want_tokens, want, _), (tokens, logits, _) = loops
    want, logits = np.asarray(want), np.asarray(logits)
    np.testing.assert_array_equal(tokens, want_tokens)
    # An E4M3 code is off by up to 2^-4 of itself; in three layers that comes to 2.9 % of
    # the logits here. Less than one rounding to BF16 would mean that no FP8 was read.
    error = np.linalg.norm(logits - want) / np.linalg.norm(want)
    assert 2**-8 < error < 0.05


def test_a_dense_batch_gives_each_row_a_run_of_pages():
    cache = fp8kv.init_cache(
        fp8kv.CacheConfig(
            num_layers=1, num_kv_heads=1, head_dim=16, num_pages=5, page_size=8
        )
    )
    batch = fp8kv.dense_batch(jnp.zeros((2, 3), jnp.int32), 14, cache)
    # Two pages of eight tokens each; the third token is past them.
    assert batch.slot_mapping.tolist() == [[14, 15, -1], [30, 31, -1]]
    assert batch.block_table.tolist() == [[0, 1], [2, 3]]
    assert batch.query_starts.tolist() == [14, 14]
    assert batch.seq_lens.tolist() == [16, 16]
    with pytest.raises(
        ValueError, match="page for each of 6 sequences, got a cache of 5"
    ):
        fp8kv.dense_batch(jnp.zeros((6, 1), jnp.int32), 0, cache)
