"""P3: one compilation, one cond, no host in the loop, no copy of a pool."""

import re

import chex
import jax
import jax.numpy as jnp
import pytest
import tiny_model

import fp8kv_jax as fp8kv

WINDOW = 12
# Large enough that nothing but a pool has its shape.
POOL = {"num_pages": 37, "page_size": 8}


def make_loop(**cache):
    config = tiny_model.cache_config(**(POOL | cache))
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(window_tokens=WINDOW), config, max_tokens_per_step=4
    )
    return fp8kv.init_cache(config), state


def decode_batch(position, page_size=8):
    slots = jnp.full((4, 1), -1, jnp.int32).at[0, 0].set(position)
    return fp8kv.Batch(
        token_ids=jnp.full((4, 1), 7, jnp.int32),
        slot_mapping=slots,
        query_starts=jnp.full((4,), position, jnp.int32),
        seq_lens=jnp.array([position + 1, 0, 0, 0], jnp.int32),
        block_table=jnp.tile(jnp.arange(4, dtype=jnp.int32), (4, 1)),
    )


def test_one_trace_serves_the_window_the_freeze_and_after():
    chex.clear_trace_counter()
    step = fp8kv.make_steps(tiny_model.forward).decode_step
    step = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=(1, 2))
    params = tiny_model.init_params()
    cache, state = make_loop()
    phases = []
    for position in range(WINDOW + 3):
        _, cache, state = step(params, cache, state, decode_batch(position))
        phases.append(bool(state.frozen))
    assert phases == [False] * (WINDOW - 1) + [True] * 4


def count_conds(jaxpr):
    """Conds of a jaxpr and all it calls, outside kernels."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "cond"
        if eqn.primitive.name in ("pallas_call", "core_map"):
            continue
        for sub in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                count += count_conds(getattr(sub, "jaxpr", sub))
    return count


def test_a_step_holds_exactly_one_cond():
    cache, state = make_loop()
    step = fp8kv.make_steps(tiny_model.forward, implementation="xla").decode_step
    args = (tiny_model.init_params(), cache, state, decode_batch(0))
    assert count_conds(jax.make_jaxpr(step)(*args).jaxpr) == 1


def compiled_text(step, *args):
    return jax.jit(step, donate_argnums=(1, 2)).lower(*args).compile().as_text()


def assert_no_host(text):
    """No transfer, and no custom call into Python, among the instructions."""
    assert not re.search(r" (infeed|outfeed|send|recv|copy-start)\(", text)
    assert not re.search(r'custom_call_target="[^"]*callback', text)
    # S(5) is the host's memory space.
    assert "S(5)" not in text


def pool_sized_copies(text, cache):
    """Copy instructions of the optimized HLO whose result has a pool's sizes."""
    shapes = {tuple(x.shape) for x in (*cache.k_pages, *cache.v_pages)}
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= \w+\[([\d,]+)\]\S* (copy|copy-start|convert|bitcast-convert)\(", line
        )
        if match and tuple(map(int, match[1].split(","))) in shapes:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("name", ["decode_step", "prefill_step"])
def test_the_compiled_step_has_no_host_call_and_copies_no_pool(name):
    cache, state = make_loop()
    step = getattr(fp8kv.make_steps(tiny_model.forward), name)
    args = (tiny_model.init_params(), cache, state, decode_batch(0))
    text = compiled_text(step, *args)
    assert_no_host(text)
    assert pool_sized_copies(text, cache) == []
    donated = re.search(r"input_output_alias=\{(.*?)\}, entry", text)[1]
    assert donated.count("alias") >= 4


def test_the_search_for_copies_finds_one():
    cache, state = make_loop()

    def step(params, cache, state, batch):
        _, after, state = fp8kv.make_steps(tiny_model.forward).decode_step(
            params, cache, state, batch
        )
        # Reading the old pools after the update forces copies of them.
        return sum(jnp.sum(x.astype(jnp.float32)) for x in cache.k_pages), after, state

    text = compiled_text(step, tiny_model.init_params(), cache, state, decode_batch(0))
    assert pool_sized_copies(text, cache)


def test_importing_the_package_starts_no_device():
    import subprocess
    import sys

    code = (
        "import sys, fp8kv_jax, pallas_kernels.paged_attention\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "heavy = {'flax', 'orbax', 'gguf', 'tokenizers', 'typer', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
