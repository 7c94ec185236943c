"""Snapshots: what a restart takes over, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_loop import WatchedEngine, ask, engine_with_scales, prompt_of, run_all

from fp8kv_jax.serving.snapshot import (
    SnapshotError,
    _page_arrays,
    _sealed,
    load_snapshot,
    save_snapshot,
)

MODEL = {"weights": "a", "config": "b"}


def make_watched(**options):
    """Of the sizes that other tests have compiled already."""
    return WatchedEngine(**({"num_pages": 20} | options))


def make_engine(**options):
    return make_watched(**options).engine


def used_engine(*, num_prompts=3, **options):
    engine = make_engine(**options)
    for seed in range(num_prompts):
        ask(engine, prompt_of(30, seed), max_tokens=1)
    run_all(engine)
    return engine


def state_of(engine):
    return [np.asarray(x) for x in jax.tree.leaves(engine.calibration)]


def assert_same_scales(a, b):
    for name in ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale", "k_amax", "epoch"):
        one, two = (getattr(engine.calibration, name) for engine in (a, b))
        np.testing.assert_array_equal(one, two)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A frozen engine and its snapshot; tests copy it."""
    engine = used_engine()
    folder = tmp_path_factory.mktemp("snapshots")
    save_snapshot(folder, engine, model=MODEL, max_pages=99)
    return engine, folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved[1], tmp_path / "copy"))


def test_a_restart_has_scales_and_prefixes_at_once(saved, folder):
    before = saved[0]
    after = make_engine()
    restored = load_snapshot(folder, after, model=MODEL)
    assert restored.frozen
    assert restored.tokens_seen == before.stats().tokens_seen
    assert_same_scales(before, after)
    assert not after.stats().has_window
    assert after.stats().num_cached_pages == restored.num_pages == 9
    asked = ask(after, prompt_of(30, 1), max_tokens=6)
    ids, outputs = run_all(after)
    assert outputs[asked, 0][0].num_cached_tokens == 24
    again = ask(before, prompt_of(30, 1), max_tokens=6)
    assert run_all(before)[0][again, 0] == ids[asked, 0]


def test_restored_pages_are_byte_for_byte_those_saved(saved, folder):
    before, after = saved[0], make_engine()
    load_snapshot(folder, after, model=MODEL)
    pages = [engine.pool.published() for engine in (before, after)]
    keys = list(pages[1])
    arrays = [
        _page_arrays(engine, [where[key] for key in keys])
        for engine, where in zip((before, after), pages, strict=True)
    ]
    for name, bits in arrays[0].items():
        np.testing.assert_array_equal(bits, arrays[1][name])


def test_row_30_pools_rebuilt_keep_their_scales(saved, tmp_path):
    save_snapshot(tmp_path, saved[0], model=MODEL)
    watched = make_watched()
    restored = load_snapshot(tmp_path, watched.engine, model=MODEL)
    ask(watched.engine, prompt_of(20), max_tokens=4)
    run_all(watched.engine)
    assert_same_scales(saved[0], watched.engine)
    assert watched.engine.stats().tokens_seen == restored.tokens_seen
    assert watched.engine.stats().num_cached_tokens == 0
    assert watched.differing_bytes == 0


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_wider_pages_come_back_bit_for_bit(tmp_path, dtype):
    before, after = (make_engine(dtype=dtype) for _ in range(2))
    cache = before.runner.cache
    noise = jax.random.normal(jax.random.key(0), cache.k_pages[0].shape)
    pools = tuple(noise.astype(pages.dtype) for pages in cache.k_pages)
    before.runner.cache = replace(cache, k_pages=pools)
    before.pool.publish(page := before.pool.take(), b"key")
    save_snapshot(tmp_path, before, model=MODEL, max_pages=1)
    assert load_snapshot(tmp_path, after, model=MODEL).num_pages == 1
    got = after.runner.cache.k_pages[1][after.pool.find(b"key")]
    np.testing.assert_array_equal(np.asarray(got), np.asarray(pools[1][page]))


def test_a_smaller_pool_takes_the_beginnings(folder):
    engine = make_engine(num_pages=7)
    assert load_snapshot(folder, engine, model=MODEL).num_pages == 7
    assert engine.stats().num_free_pages == 7


def test_without_pages_only_the_calibration_comes_back(saved, tmp_path):
    save_snapshot(tmp_path, saved[0], model=MODEL)
    engine = make_engine()
    assert load_snapshot(tmp_path, engine, model=MODEL).num_pages == 0
    assert_same_scales(saved[0], engine)


def test_a_calibration_under_way_goes_on(tmp_path):
    first = used_engine(num_prompts=1)
    assert not first.stats().frozen
    save_snapshot(tmp_path, first, model=MODEL, max_pages=99)
    watched = make_watched()
    restored = load_snapshot(tmp_path, watched.engine, model=MODEL)
    assert (restored.frozen, restored.tokens_seen, restored.num_pages) == (False, 30, 0)
    ask(watched.engine, prompt_of(40, 9), max_tokens=4)
    run_all(watched.engine)
    assert watched.engine.stats().frozen
    assert watched.differing_bytes == 0
    # Both prompts count: the first one's amax is in the scales.
    amax = np.asarray(watched.engine.calibration.k_amax)
    assert (amax >= np.asarray(first.calibration.k_amax)).all()


def test_no_snapshot_is_no_error(tmp_path):
    assert load_snapshot(tmp_path / "none", make_engine(), model=MODEL) is None


def test_a_new_snapshot_replaces_the_one_before(saved, tmp_path):
    for number in (1, 2):
        place = save_snapshot(tmp_path, saved[0], model=MODEL)
        assert [path.name for path in tmp_path.iterdir()] == [place.name]
        assert place.name == f"snapshot-00000{number}"


def refused(folder, message, *, model=MODEL, **options):
    engine = make_engine(**options)
    before = state_of(engine)
    with pytest.raises(SnapshotError, match=message) as caught:
        load_snapshot(folder, engine, model=model)
    assert "\n" not in str(caught.value)
    for one, two in zip(before, state_of(engine), strict=True):
        np.testing.assert_array_equal(one, two)
    assert engine.stats().num_free_pages == engine.stats().num_pages


def test_another_model_is_refused(folder):
    refused(folder, r"another model\.config\.$", model={"weights": "a", "config": "c"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "head"}, r"another calibration\.groups"),
        ({"dtype": "bf16"}, r"another cache\.pools"),
    ],
)
def test_another_cache_is_refused(folder, options, message):
    refused(folder, message, **options)


def test_another_window_is_refused_while_it_is_open(tmp_path):
    save_snapshot(tmp_path, used_engine(num_prompts=1), model=MODEL)
    refused(tmp_path, "to be calibrating over 50 tokens, got 60", window=50)


def test_an_engine_at_work_is_refused(folder):
    engine = make_engine()
    ask(engine, prompt_of(3))
    with pytest.raises(SnapshotError, match="an engine without requests"):
        load_snapshot(folder, engine, model=MODEL)


def test_a_changed_description_is_refused(folder):
    path = next(folder.glob("*/snapshot.json"))
    path.write_bytes(path.read_bytes().replace(b'"page_size":8', b'"page_size":9'))
    refused(folder, "to describe the snapshot, got one that was changed")


def test_a_missing_description_is_refused(folder):
    next(folder.glob("*/snapshot.json")).unlink()
    refused(folder, "to describe the snapshot, got FileNotFoundError")


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damaged_arrays_are_refused(folder, how):
    files = [p for p in folder.glob("*/arrays/**/d/*") if p.is_file()]
    for path in [*files, *folder.glob("*/arrays/**/manifest.ocdbt")]:
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            for at in range(0, len(data), 97):
                data[at] ^= 0x10
            path.write_bytes(data)
    refused(folder, "arrays of .* to be those that were saved, got others")


def test_arrays_of_another_snapshot_are_refused(folder, tmp_path):
    other = save_snapshot(tmp_path / "other", used_engine(num_prompts=4), model=MODEL)
    mine = next(folder.iterdir())
    shutil.rmtree(mine / "arrays")
    shutil.copytree(other / "arrays", mine / "arrays")
    refused(folder, "arrays of .* to be those that were saved, got others")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_are_none_are_refused(tmp_path, value):
    engine = used_engine()
    state = engine.calibration
    bad = jnp.asarray(state.k_scale).at[1].set(value)
    object.__setattr__(state, "k_scale", bad)
    save_snapshot(tmp_path, engine, model=MODEL)
    refused(tmp_path, r"scales of K .* got others in layers \[1\]")


def test_a_reciprocal_of_another_scale_is_refused(tmp_path):
    engine = used_engine()
    state = engine.calibration
    object.__setattr__(state, "v_inv_scale", 2 * state.v_inv_scale)
    save_snapshot(tmp_path, engine, model=MODEL)
    refused(tmp_path, r"scales of V .* with their reciprocals")


def start_writer(folder, kind):
    """Runs `write_snapshots.py`; Orbax leaves threads and loops in disorder on errors."""
    script = Path(__file__).with_name("write_snapshots.py")
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def test_a_full_disk_leaves_the_snapshot_before(tmp_path):
    place, error = start_writer(tmp_path, "full").communicate()[0].splitlines()
    assert "Expected to write a snapshot in" in error
    # Threads of Orbax may still be writing to what is removed: it stays hidden.
    seen = [path.name for path in tmp_path.iterdir() if path.name[0] != "."]
    assert seen == [place]
    engine = engine_with_scales()
    assert load_snapshot(tmp_path, engine, model={"weights": "a"}).num_pages == 8
    save_snapshot(tmp_path, engine, model={"weights": "a"})
    assert len(list(tmp_path.iterdir())) == 1


def test_a_killed_writer_leaves_a_whole_snapshot(tmp_path):
    writer = start_writer(tmp_path, "for-ever")
    try:
        promised = writer.stdout.readline().strip()
        # Into one of the saves that follow.
        time.sleep(0.3)
    finally:
        writer.kill()
        rest = writer.communicate()[0].split()
    promised = [promised, *rest][-1]
    engine = engine_with_scales()
    restored = load_snapshot(tmp_path, engine, model={"weights": "a"})
    assert restored.folder.name >= promised
    assert restored.num_pages == 8
    save_snapshot(tmp_path, engine, model={"weights": "a"})
    assert len(list(tmp_path.iterdir())) == 1


def test_the_description_is_json(folder):
    sealed = json.loads(next(folder.glob("*/snapshot.json")).read_text())
    assert sealed["body"]["model"] == MODEL
    assert json.loads(_sealed(sealed["body"])) == sealed
