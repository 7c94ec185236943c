"""The engine on a mesh of eight devices; `test_parallel_engine` runs it where such are."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_model
from jax.sharding import Mesh
from serving_loop import WatchedEngine, ask, make_engine, prompt_of, run_all

import fp8kv_jax as fp8kv
from fp8kv_jax.cli import serve
from fp8kv_jax.cli.devices import load_on
from fp8kv_jax.cli.errors import UserError
from fp8kv_jax.cli.main import run
from fp8kv_jax.cli.options import ComputeDtype
from fp8kv_jax.cli.static_scales import load_scales
from fp8kv_jax.serving.snapshot import load_snapshot, save_snapshot

TINY = Path(__file__).parents[2] / "models/data/tiny_llama"
# Fewer pages than the requests need at a time: they leave for the host and come back.
SIZES = {"num_pages": 20, "window": 60, "host_pages": 6}


def placement_of(num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    return fp8kv.place(mesh, tiny_model.NUM_KV_HEADS)


def serve_all(watched):
    """Runs prompts with forks, shared beginnings, an abort and too few pages."""
    engine, ids = watched.engine, {}
    for i in range(12):
        ask(engine, prompt_of(9 + 3 * i, seed=i % 3), n=1 + i % 3, max_tokens=12)
    for step in range(1000):
        if step == 5:
            engine.abort(3)
        for output in engine.step():
            key = output.request_id, output.index
            ids.setdefault(key, []).extend(output.token_ids)
        if step % 4 == 0:
            assert watched.differing_bytes == 0
        if not engine.has_work:
            break
    assert watched.differing_bytes == 0
    return ids


@pytest.fixture(scope="module")
def one_device():
    watched = WatchedEngine(**SIZES)
    return watched, serve_all(watched)


@pytest.fixture(scope="module")
def eight_devices():
    watched = WatchedEngine(**SIZES, placement=placement_of(4))
    return watched, serve_all(watched)


def test_tokens_scales_and_bytes_are_those_of_one_device(one_device, eight_devices):
    (want, want_ids), (watched, ids) = one_device, eight_devices
    stats = watched.engine.stats()
    assert ids == want_ids
    assert stats == want.engine.stats()
    assert stats.frozen
    assert not stats.has_window
    assert stats.num_page_copies > 0
    assert stats.num_preemptions > 0
    assert watched.engine.host_pages.num_loaded > 0
    state = watched.runner.calibration
    np.testing.assert_array_equal(state.k_scale, want.runner.calibration.k_scale)
    np.testing.assert_array_equal(state.v_scale, want.runner.calibration.v_scale)
    pool = watched.runner.cache.k_pages[0]
    assert pool.sharding.shard_shape(pool.shape) == (20, 1, 8, 16)


def test_a_snapshot_of_many_devices_starts_on_any_number(eight_devices, tmp_path):
    engine = eight_devices[0].engine
    save_snapshot(tmp_path, engine, model={}, max_pages=20)
    for placement in (None, placement_of(2)):
        other = make_engine(num_pages=20, placement=placement)
        restored = load_snapshot(tmp_path, other, model={})
        assert restored.frozen
        assert restored.num_pages == len(engine.pool.published()) > 0
        for key, page in other.pool.published().items():
            source = engine.pool.published()[key]
            for want, got in zip(
                jax.tree.leaves(engine.runner.cache),
                jax.tree.leaves(other.runner.cache),
                strict=True,
            ):
                np.testing.assert_array_equal(got[page], want[source])
        if placement is not None:
            where = placement.shardings(other.runner.cache)
            assert other.runner.cache.k_pages[0].sharding == where.k_pages[0]


def test_new_weights_find_the_engine_in_place(eight_devices):
    watched, ids = eight_devices
    params = watched.runner.placement.put_replicated(
        tiny_model.init_params(planted=True)
    )
    watched.engine.reset(params)
    assert not watched.engine.stats().frozen
    request = ask(watched.engine, prompt_of(9), max_tokens=12)
    got, _ = run_all(watched.engine)
    assert got[request, 0] == ids[0, 0]
    assert watched.differing_bytes == 0


def test_a_data_axis_is_refused():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    placement = fp8kv.place(mesh, tiny_model.NUM_KV_HEADS, data="data")
    with pytest.raises(ValueError, match="without a data axis, got 2 along it"):
        make_engine(placement=placement)


@pytest.fixture
def generate(capsys):
    """Runs `fp8kv generate --json` on some devices; `fails` returns the error."""

    def run_it(num_devices, *flags, fails=False):
        sizes = "--max-new-tokens", "12", "--page-size", "8", "--json"
        command = "generate", "--model", TINY, "the quick", *sizes, *flags
        code = run([*map(str, command), "--tensor-parallel-size", str(num_devices)])
        out, err = capsys.readouterr()
        assert code == (2 if fails else 0), err
        return err if fails else json.loads(out)

    return run_it


def test_a_model_and_its_artifact_serve_on_any_number_of_devices(generate, tmp_path):
    artifact = tmp_path / "scales"
    window = "--fp8-kv-calibration-tokens", 8
    many = generate(4, *window, "--save-fp8-kv-scales", artifact)
    one = generate(1, *window)
    assert many["outputs"] == one["outputs"]
    layers, expected = (x["calibration"]["layers"] for x in (many, one))
    for num_devices in (1, 2):
        model, _ = load_on(num_devices, TINY, ComputeDtype.FLOAT32)
        scales = load_scales(artifact, model, allow_mismatch=None).scale_set
        for row, (got, want) in enumerate(zip(layers, expected, strict=True)):
            # The model's sums over devices come in another order.
            assert got["k_scale"] == pytest.approx(want["k_scale"], rel=0.02)
            assert scales.k_scale[row] == np.float32(got["k_scale"])
            assert scales.v_scale[row] == np.float32(got["v_scale"])


def test_the_server_spreads_weights_and_pages(monkeypatch):
    served = []
    monkeypatch.setattr(
        serve, "_serve", lambda request, bound, engine, *_: served.append(engine)
    )
    sizes = (
        "--max-num-seqs 4 --max-model-len 64 --max-num-batched-tokens 68 --page-size 8"
    )
    assert (
        run(
            [
                "serve",
                "--model",
                str(TINY),
                *sizes.split(),
                "--port",
                "0",
                "--tensor-parallel-size",
                "2",
            ]
        )
        == 0
    )
    (engine,) = served
    kernel = engine.runner.params["layers"][0]["attention"]["k"]["kernel"]
    pool = engine.runner.cache.v_pages[1]
    for x, axis in ((kernel, 1), (pool, 1)):
        own = x.sharding.shard_shape(x.shape)
        assert own[axis] == x.shape[axis] // 2


def test_what_does_not_divide_is_one_line(generate):
    error = generate(3, fails=True)
    assert "num_kv_heads=2 to be a multiple or a divisor of the 3 devices" in error
    assert error.count("\n") == 1


def test_too_many_devices_are_refused():
    with pytest.raises(UserError, match="size of at most 8, the devices"):
        load_on(9, None, ComputeDtype.FLOAT32)
