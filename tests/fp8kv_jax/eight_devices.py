"""What holds on a mesh of eight devices; `test_parallel` runs it where there are such."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import mesh_loop
import numpy as np
import pytest
from jax.sharding import Mesh

import fp8kv_jax as fp8kv
from fp8kv_jax import counters
from fp8kv_jax.drift import telemetry
from fp8kv_jax.parallel import check_step, join_batches
from fp8kv_jax.recalibration import NewScales, recalibrate
from models.config import ModelConfig
from models.rope import Rope
from models.sharding import shard_params
from models.transformer import bind_forward, random_model


def placement_of(num_kv_heads, num_tensor, num_data=1):
    devices = np.array(jax.devices()[: num_data * num_tensor])
    mesh = Mesh(devices.reshape(num_data, num_tensor), ("data", "tensor"))
    return fp8kv.place(mesh, num_kv_heads, data="data")


@functools.cache
def on_one_device(num_kv_heads, granularity, telemetry=False):
    return mesh_loop.run(num_kv_heads, granularity, telemetry=telemetry)


def assert_bit_equal(got, want):
    paths = jax.tree.leaves_with_path(want)
    for (path, x), y in zip(paths, jax.tree.leaves(got), strict=True):
        x, y = (np.atleast_1d(a).view(np.uint8) for a in (x, y))
        np.testing.assert_array_equal(y, x, err_msg=jax.tree_util.keystr(path))


# KV heads, devices that share them, devices that share sequences, granularity, and
# how much telemetry counts at once: None for no telemetry.
SOME_MESHES = [
    (2, 4, 1, "tensor", None),
    (8, 8, 1, "head", 512),
    (2, 4, 2, "tensor", 8),  # layer by layer, as a batch of more than 512 tokens goes
]
OTHER_MESHES = [
    (1, 2, 1, "tensor", None),
    (1, 4, 1, "head", None),
    (1, 8, 1, "tensor", 512),
    (2, 2, 1, "head", 8),
    (2, 8, 1, "head", None),
    (8, 2, 1, "head", None),
    (8, 4, 1, "tensor", 8),
    (8, 2, 4, "tensor", None),
]


@pytest.mark.parametrize(
    ("num_kv_heads", "num_tensor", "num_data", "granularity", "counted_at_once"),
    SOME_MESHES + [pytest.param(*x, marks=pytest.mark.slow) for x in OTHER_MESHES],
)
def test_given_rows_leave_the_bytes_and_scales_of_one_device(
    num_kv_heads, num_tensor, num_data, granularity, counted_at_once, monkeypatch
):
    listens = counted_at_once is not None
    want = on_one_device(num_kv_heads, granularity, listens)
    monkeypatch.setattr(telemetry, "MAX_TOKENS_AT_ONCE", counted_at_once)
    placement = placement_of(num_kv_heads, num_tensor, num_data)
    got = mesh_loop.run(num_kv_heads, granularity, placement, telemetry=listens)
    assert got["compilations"] == 1
    assert_bit_equal(got["cache"], want["cache"])
    assert_bit_equal(got["state"], want["state"])
    # A softmax and two products of float32, a head at a time: only XLA's choice of
    # loops may differ.
    for x, y in zip(got["outs"], want["outs"], strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2**-7, atol=1e-5
        )


def test_the_loop_passes_through_all_that_can_happen():
    got = on_one_device(8, "head", True)
    assert got["frozen"] == [False] * 2 + [True] * 4
    state = got["state"]
    assert int(counters.total(state.num_dropped)) == 1
    assert int(state.num_requantized) > mesh_loop.WINDOW
    assert (counters.total(state.k_tally.saturated)[0] > 0).all()
    assert counters.total(state.v_tally.nonfinite).sum() == mesh_loop.NUM_STEPS
    counted = telemetry.summarize(state.telemetry)
    assert (counted.tokens > 0).all()
    values = counted.values[:, None] - counted.v.nonfinite  # those are in no bin
    np.testing.assert_array_equal(counted.v.histogram.sum(axis=-1), values)


CONFIG = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=96,
    max_context=64,
    ropes=(Rope(base=1e4),) * 2,
    sliding_windows=(None,) * 2,
    softmax_scale=0.25,
    rms_norm_eps=1e-5,
    qkv_bias=True,
)


@functools.cache
def greedy(placement=None, num_tokens=10):
    """Token ids of four texts decoded greedily, the state and the compiled text."""
    graphdef, params = random_model(CONFIG, seed=0, dtype=jnp.float32)
    cache_config = fp8kv.CacheConfig(
        num_layers=2, num_kv_heads=2, head_dim=16, num_pages=16, page_size=8
    )

    def make_state():
        config = fp8kv.CalibrationConfig(window_tokens=24)
        return fp8kv.init_calibration(config, cache_config, max_tokens_per_step=4)

    cache, state = fp8kv.init_cache(cache_config), make_state()
    if placement is not None:
        params = shard_params(CONFIG, params, placement)
        cache, state = placement.put(cache), placement.make(make_state)
    step = fp8kv.make_steps(bind_forward(graphdef), placement=placement).decode_step
    step, compiled = jax.jit(step, donate_argnums=(1, 2)), None
    ids, found = np.arange(4) + 7, []
    for position in range(num_tokens):
        table = np.arange(16).reshape(4, 4)
        arrays = {
            "token_ids": ids[:, None],
            "slot_mapping": table[:, position // 8, None] * 8 + position % 8,
            "query_starts": np.full(4, position),
            "seq_lens": np.full(4, position + 1),
            "block_table": table,
        }
        batch = fp8kv.Batch(**{k: jnp.asarray(x, jnp.int32) for k, x in arrays.items()})
        batch = batch if placement is None else placement.put(batch)
        # Compiled once: it refuses arguments that lie elsewhere than the first ones.
        if compiled is None:
            compiled = step.lower(params, cache, state, batch).compile()
        logits, cache, state = compiled(params, cache, state, batch)
        ids = np.asarray(logits).argmax(axis=1)
        found.append(ids)
    return np.stack(found), state, compiled.as_text()


@pytest.mark.slow  # the engine's tests run a model on four devices
@pytest.mark.parametrize(("num_tensor", "num_data"), [(2, 1), (8, 1), (4, 2)])
def test_a_model_decodes_the_tokens_of_one_device(num_tensor, num_data):
    want_ids, want, _ = greedy()
    ids, state, _ = greedy(placement_of(2, num_tensor, num_data))
    np.testing.assert_array_equal(ids, want_ids)
    assert state.frozen
    assert state.tokens_seen == want.tokens_seen
    # Sums over devices come in another order, so rows differ before they are rounded
    # to BF16, and FP8 codes that flip inside the window reach the layers after.
    np.testing.assert_allclose(state.k_scale, want.k_scale, rtol=0.02)
    np.testing.assert_allclose(state.v_scale, want.v_scale, rtol=0.02)


def test_a_step_gathers_no_pool_and_no_weights():
    _, _, text = greedy(placement_of(2, 8), num_tokens=1)
    gathered = re.findall(r"= (\w+\[[\d,]*\])\S* all-(?:gather|to-all)\(", text)
    sizes = [
        int(np.prod([int(n) for n in re.findall(r"\d+", x)[1:]])) for x in gathered
    ]
    # At most the residual's rows; the smallest weight is 64 x 2 x 16, a pool 16 x 8 x 2
    # x 16.
    assert max(sizes, default=0) <= 4 * CONFIG.hidden_size


def test_joined_batches_number_pages_and_slots_over_all_stretches():
    def batch(slots, copies):
        return fp8kv.Batch(
            token_ids=jnp.zeros((1, 2), jnp.int32),
            slot_mapping=jnp.array([slots], jnp.int32),
            query_starts=jnp.zeros(1, jnp.int32),
            seq_lens=jnp.ones(1, jnp.int32),
            block_table=jnp.array([[0, 1]], jnp.int32),
            page_copies=jnp.array([copies], jnp.int32),
        )

    parts = [batch([3, -1], [0, 1]), batch([3, 8], [-1, -1])]
    joined = join_batches(parts, num_pages=4, page_size=8)
    assert joined.slot_mapping.tolist() == [[3, -1], [19, 24]]
    assert joined.block_table.tolist() == [[0, 1], [2, 3]]
    assert joined.page_copies.tolist() == [[0, 1], [-1, -1]]
    with pytest.raises(ValueError, match="num_pages=5 to divide evenly among 2"):
        join_batches(parts, num_pages=5, page_size=8)


def test_what_does_not_divide_is_refused():
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, 4), ("data", "tensor"))
    with pytest.raises(ValueError, match="multiple or a divisor of the 4 devices"):
        fp8kv.place(mesh, 6, data="data")
    with pytest.raises(ValueError, match=r"split over \('tensor',\) alone"):
        fp8kv.place(mesh, 2)
    with pytest.raises(ValueError, match="axes of a placement's mesh to be"):
        fp8kv.Placement(mesh)
    placement = placement_of(2, 4, 2)
    with pytest.raises(TypeError, match="got int"):
        placement.put(3)
    cache = fp8kv.init_cache(
        fp8kv.CacheConfig(
            num_layers=1, num_kv_heads=2, head_dim=16, num_pages=5, page_size=8
        )
    )
    batch, _ = mesh_loop.make_batch(0, 0)
    with pytest.raises(ValueError, match="num_pages=5 to be a multiple of 2"):
        check_step(placement, cache, batch)
    with pytest.raises(ValueError, match="num_kv_heads=2 to be a multiple of 8"):
        check_step(placement_of(8, 8), cache, batch)
    make_cache, _ = mesh_loop.make_loop(2)
    with pytest.raises(ValueError, match="a MixedBatch share one row"):
        check_step(placement, make_cache(), fp8kv.MixedBatch(parts=(batch,)))
    three = jax.tree.map(lambda x: x[:3], batch)
    with pytest.raises(ValueError, match="num_seqs=3 to be a multiple of 2"):
        check_step(placement, make_cache(), three)
    with pytest.raises(ValueError, match="8 query heads of a KV head"):
        mesh_loop.run(1, placement=placement_of(1, 3))


@pytest.mark.slow  # the engine's tests on eight devices run mixed batches too
def test_a_mixed_batch_leaves_the_bytes_of_one_device():
    make_cache, make_state = mesh_loop.make_loop(2)

    def run(placement):
        write = jax.jit(mesh_loop.make_write(placement), donate_argnums=(0, 1))
        cache, state = make_cache(), make_state()
        batch, _ = mesh_loop.make_batch(0, 0)
        batch = replace(batch, page_copies=batch.page_copies[:0])
        halves = [jax.tree.map(lambda x, i=i: x[i : i + 2], batch) for i in (0, 2)]
        batch = fp8kv.MixedBatch(parts=tuple(halves))
        row = [x.reshape(2, 1, 20, -1, 16) for x in mesh_loop.make_rows(0, 2)]
        state = replace(state, window=jnp.int32(20))
        if placement is not None:
            cache, state, batch = placement.put((cache, state, batch))
        out, cache, state = write(cache, state, batch, *row)
        return out, cache, fp8kv.release_window(state)

    want, got = run(None), run(placement_of(2, 4))
    assert_bit_equal(got[1:], want[1:])


def test_new_scales_rewrite_the_pages_of_every_device():
    make_cache, make_state = mesh_loop.make_loop(2, "head")

    def run(placement):
        rng = np.random.default_rng(0)
        codes = [rng.integers(0, 127, x.shape) for x in jax.tree.leaves(make_cache())]
        pools = [jnp.asarray(x, jnp.uint8) for x in codes]
        cache = jax.tree.unflatten(jax.tree.structure(make_cache()), pools)
        state = replace(make_state(), frozen=jnp.array(True), staged=None)
        new = NewScales(
            k_scale=state.k_scale * jnp.array([1.5, 3.0])[None],
            v_scale=state.v_scale * jnp.array([0.7, 2.0])[None],
            k_amax=jnp.ones_like(state.k_amax),
            v_amax=jnp.ones_like(state.v_amax),
        )
        if placement is not None:
            cache, state = placement.put((cache, state))
        move = functools.partial(recalibrate, placement=placement)
        error, *moved = jax.jit(move, donate_argnums=(0, 1))(cache, state, new)
        return error, tuple(moved)

    placement = placement_of(2, 2, 2)
    (want_error, want), (error, got) = run(None), run(placement)
    assert int(got[1].epoch) == 1
    assert_bit_equal(got, want)
    where = jax.tree.map(lambda x: x.sharding, got)
    assert jax.tree.leaves(where) == jax.tree.leaves(placement.shardings(got))
    # Sums of float32 in another order.
    for x, y in zip(jax.tree.leaves(error), jax.tree.leaves(want_error), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)
        assert (np.asarray(y)[:, 0] > 1e-3).all()
