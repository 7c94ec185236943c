"""The step with the Mosaic kernels, on the GPU they are for."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from oracle import pool_rows
from rows_loop import RowsLoop
from test_compilation import assert_no_host, compiled_text

import fp8kv_jax as fp8kv
from fp8kv_jax.recalibration import moving_scales, recalibrate

pytestmark = pytest.mark.gpu

# Above 256 tokens the append moves whole page tiles, below it single tokens.
CHUNK, NUM_PAGES = 320, 24


def random_writes(loop, seed, num_steps=10):
    """Chunks, decodes, reuse, duplicates, page copies and padding, with NaN and Inf."""
    rng = np.random.default_rng(seed)
    config = loop.config
    page_size = config.page_size
    outs = []
    for step in range(num_steps):
        num = CHUNK if step % 3 == 0 else int(rng.integers(1, 9))
        shape = (config.num_layers, num, config.num_kv_heads, config.head_dim)
        k, v, q = (rng.normal(0, s, shape).astype(jnp.bfloat16) for s in (9, 2, 1))
        k[0, 0, 0, 1], v[0, 0, 0, 2] = np.nan, np.inf
        if num == CHUNK:
            start = int(rng.integers(0, config.num_slots - CHUNK))
            slots = np.arange(start, start + CHUNK)
            slots[rng.random(CHUNK) < 0.05] = -1
        else:
            slots = rng.integers(-1, config.num_slots, num)
            slots[-1] = slots[0]
        pages = rng.permutation(NUM_PAGES)[:2]
        copies = [pages if step % 2 else (-1, -1)]
        seq_len = int(rng.integers(num, NUM_PAGES * page_size))
        outs.append(loop.write(k, v, q=q, slots=slots, copies=copies, seq_len=seq_len))
        assert loop.differing_bytes == 0
    return outs


def make_loop(implementation, granularity, page_size=64, head_dim=64):
    return RowsLoop(
        chunk=CHUNK,
        implementation=implementation,
        granularity=granularity,
        window_tokens=500,
        cache={
            "num_layers": 2,
            "num_kv_heads": 2,
            "head_dim": head_dim,
            "num_pages": NUM_PAGES,
            "page_size": page_size,
        },
    )


@pytest.mark.parametrize(
    ("granularity", "page_size", "head_dim"),
    [("tensor", 64, 64), ("head", 128, 128), ("head", 128, 256)],
)
def test_pools_equal_one_shot_quantization_and_the_fallback(
    granularity, page_size, head_dim
):
    loops = [
        make_loop(implementation, granularity, page_size, head_dim)
        for implementation in (None, "xla")
    ]
    outs = [random_writes(loop, seed=1) for loop in loops]
    # The staged rows are used up, and their NaN would equal nothing.
    states = [replace(loop.state, staged=None) for loop in loops]
    assert all(bool(state.frozen) for state in states)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*outs, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        a, b = (np.nan_to_num(x.astype(np.float32)) for x in (a, b))
        assert np.linalg.norm(a - b) <= 2**-7 * np.linalg.norm(b)


def test_the_cpu_writes_the_same_bytes_and_counts():
    gpu = make_loop(None, "head")
    random_writes(gpu, seed=2, num_steps=6)
    with jax.default_device(jax.devices("cpu")[0]):
        cpu = make_loop(None, "head")
        random_writes(cpu, seed=2, num_steps=6)
    assert bool(cpu.state.frozen)
    for name in ("k_amax", "v_amax", "k_scale", "v_scale", "k_tally", "v_tally"):
        for a, b in zip(
            jax.tree.leaves(getattr(gpu.state, name)),
            jax.tree.leaves(getattr(cpu.state, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["decode_step", "prefill_step"])
def test_the_compiled_step_has_no_host_call_and_copies_no_pool(name):
    num_pages = 37
    config = fp8kv.CacheConfig(
        num_layers=2, num_kv_heads=2, head_dim=64, num_pages=num_pages
    )
    cache = fp8kv.init_cache(config)
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(), config, max_tokens_per_step=64
    )
    params = wide_params()
    num_queries = 1 if name == "decode_step" else 16
    table = fp8kv.BlockTable(num_pages=37, page_size=128, num_seqs=4, max_seq_len=512)
    tokens = {i: [3] * num_queries for i in range(4)}
    starts = dict.fromkeys(range(4), 0)
    batch = fp8kv.make_batch(table, tokens, starts, num_queries=num_queries)
    step = getattr(fp8kv.make_steps(tiny_model.forward), name)
    text = compiled_text(step, params, cache, state, batch)
    assert_no_host(text)
    assert len(re.findall(r" conditional\(", text)) == 1
    pool = rf"\[{num_pages},2,(128,64|64,128)\]"
    moved = re.findall(rf"= \w+{pool}\S* (copy|copy-start|convert|fusion)\(", text)
    assert moved == []


def test_recalibration_writes_the_fallbacks_bytes_and_copies_no_pool():
    loops = [make_loop(implementation, "head") for implementation in (None, "xla")]
    results = []
    for loop in loops:
        random_writes(loop, seed=3, num_steps=8)
        move = functools.partial(recalibrate, implementation=loop.implementation)
        move = jax.jit(move, donate_argnums=(0, 1))
        arguments = loop.cache, loop.state, moving_scales(loop.state, decay=0.5)
        text = move.lower(*arguments).compile().as_text()
        error, cache, state = move(*arguments)
        assert int(state.epoch) == 2
        results.append((error, pool_rows(cache.k_pages[1], cache.v_pages[1])))
        if loop.implementation is None:
            pool = rf"\[{NUM_PAGES},2,64,64\]"
            assert not re.findall(rf"= \w+{pool}\S* (copy|copy-start)\(", text)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def wide_params():
    """Weights of the tiny model with head_dim 64, which the kernels serve."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = 4 * 64
    layers = tiny_model.NUM_LAYERS

    def normal(key, *shape):
        return hidden**-0.5 * jax.random.normal(key, shape)

    return {
        "embedding": normal(keys[0], tiny_model.VOCAB, hidden),
        "q": normal(keys[1], layers, hidden, 4, 64),
        "k": normal(keys[2], layers, hidden, 2, 64),
        "v": normal(keys[3], layers, hidden, 2, 64),
        "planted": jnp.zeros((tiny_model.VOCAB,)),
    }
