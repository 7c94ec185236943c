"""A registry: one live artifact, a way back, and nothing lost to a killed writer."""

import concurrent.futures
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from artifact_examples import evidence, write_example

from fp8kv_jax.scales import files
from fp8kv_jax.scales.artifact import MANIFEST_NAME, add_evidence, read_artifact
from fp8kv_jax.scales.registry import Registry, find_artifact
from fp8kv_jax.scales.scale_set import ScaleError


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Three artifacts, oldest first."""
    root = tmp_path_factory.mktemp("artifacts")
    for seed in range(3):
        write_example(
            root / str(seed), seed=seed, created_at=f"2026-01-0{seed + 1}T00:00:00Z"
        )
    return [root / str(seed) for seed in range(3)]


@pytest.fixture
def registry(tmp_path, artifacts):
    """A registry of the three, none of them live; and their ids."""
    registry = Registry(tmp_path / "registry")
    return registry, [registry.add(artifact) for artifact in artifacts]


def test_artifacts_are_kept_under_their_ids_newest_first(registry, artifacts):
    registry, ids = registry
    assert [x.artifact_id for x in registry.list()] == ids[::-1]
    assert not any(x.live or x.previous for x in registry.list())
    for artifact, name in zip(artifacts, ids, strict=True):
        assert read_artifact(registry.folder / name)[1] == read_artifact(artifact)[1]


def test_adding_twice_changes_nothing(registry, artifacts, tmp_path):
    registry, ids = registry
    add_evidence(registry.folder / ids[0], evidence())
    before = (registry.folder / ids[0] / MANIFEST_NAME).read_bytes()
    assert registry.add(artifacts[0]) == ids[0]
    assert (registry.folder / ids[0] / MANIFEST_NAME).read_bytes() == before
    assert len(registry.list()) == 3


def test_what_is_no_artifact_is_not_added(tmp_path):
    with pytest.raises(ScaleError, match=r"manifest.json to be a readable file"):
        Registry(tmp_path / "registry").add(tmp_path)
    assert not (tmp_path / "registry").exists()


def test_promote_and_rollback_move_the_pointer(registry):
    registry, (a, b, c) = registry
    assert registry.live_id() is None
    for name in (a, b[:6], c):
        registry.promote(name)
    assert registry.live_id() == c
    marks = {x.artifact_id: (x.live, x.previous) for x in registry.list()}
    assert marks == {a: (False, False), b: (False, True), c: (True, False)}
    assert [registry.rollback(), registry.rollback()] == [b, a]
    with pytest.raises(
        ScaleError, match=r"was live before .* to roll back to, got none"
    ):
        registry.rollback()
    assert registry.live_id() == a
    actions = [(x.number, x.action, x.artifact_id) for x in registry.history()]
    assert actions == [
        (1, "promote", a),
        (2, "promote", b),
        (3, "promote", c),
        (4, "rollback", b),
        (5, "rollback", a),
    ]


def test_a_promotion_after_a_rollback_goes_back_to_what_was_live(registry):
    registry, (a, b, c) = registry
    registry.promote(a)
    registry.promote(b)
    registry.rollback()
    registry.promote(c)
    assert registry.rollback() == a


def test_promoting_the_live_one_again_keeps_the_way_back(registry):
    registry, (a, b, _) = registry
    for name in (a, b, b):
        registry.promote(name)
    assert registry.rollback() == a


def test_a_damaged_artifact_is_listed_and_never_promoted(registry):
    registry, (a, b, _) = registry
    registry.promote(a)
    (registry.folder / b / MANIFEST_NAME).write_text("{")
    with pytest.raises(ScaleError, match=r"manifest.json to be JSON"):
        registry.promote(b)
    assert registry.live_id() == a
    last = registry.list()[-1]
    assert (last.artifact_id, last.manifest) == (b, None)
    assert re.search(r"manifest.json to be JSON", last.problem)


def test_an_artifact_under_another_ones_name_is_not_promoted(registry):
    registry, (a, b, _) = registry
    registry.remove(a)
    (registry.folder / b).rename(registry.folder / a)
    with pytest.raises(ScaleError, match=f"the artifact of this name, got {b}"):
        registry.promote(a)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "0" * 16,
            "Expected one artifact 0{16} in .*, got 0; there are [0-9a-f]{16}, ",
        ),
        ("../x", "the name of an artifact to be an artifact id, or its beginning"),
        ("abc", "the name of an artifact to be an artifact id, or its beginning"),
    ],
)
def test_an_unknown_name_is_an_error(registry, name, message):
    registry, _ = registry
    for act in (registry.promote, registry.remove):
        with pytest.raises(ScaleError, match=message):
            act(name)


def test_what_is_live_and_what_a_rollback_needs_stays(registry):
    registry, (a, b, c) = registry
    registry.promote(a)
    registry.promote(b)
    with pytest.raises(ScaleError, match=f"got {b}, which is live"):
        registry.remove(b)
    with pytest.raises(ScaleError, match=f"got {a}, which is what a rollback needs"):
        registry.remove(a)
    assert registry.remove(c) == c
    assert {x.artifact_id for x in registry.list()} == {a, b}


def test_force_removes_the_live_one_and_leaves_nothing_live(registry):
    registry, (a, b, c) = registry
    registry.promote(a)
    registry.promote(b)
    registry.remove(b, force=True)
    assert registry.live_id() is None
    with pytest.raises(ScaleError, match=r"Expected a live artifact in .*promote one"):
        registry.live_folder()
    registry.promote(c)
    assert registry.rollback() == a


def test_a_rollback_to_what_was_removed_fails_and_changes_nothing(registry):
    registry, (a, b, _) = registry
    registry.promote(a)
    registry.promote(b)
    registry.remove(a, force=True)
    with pytest.raises(
        ScaleError, match=f"{a}: Expected manifest.json to be a readable"
    ):
        registry.rollback()
    assert registry.live_id() == b


def test_a_path_means_an_artifact_or_the_live_one_of_a_registry(registry, artifacts):
    registry, (a, _, _) = registry
    assert find_artifact(artifacts[0]) == artifacts[0]
    with pytest.raises(ScaleError, match="or a registry with a live one"):
        find_artifact(registry.folder)
    registry.promote(a)
    assert find_artifact(registry.folder) == registry.folder / a


def test_a_damaged_pointer_is_an_error_and_not_another_artifact(registry):
    registry, (a, b, _) = registry
    registry.promote(a)
    for damage in ("", "{}", b"\xff", f'{{"artifact_id": "{b}"}}'):
        data = damage if isinstance(damage, bytes) else damage.encode()
        (registry.folder / "live").write_bytes(data)
        for read in (registry.live_id, registry.live_folder, registry.list):
            with pytest.raises(ScaleError, match="live: Expected"):
                read()


def test_a_lost_history_stops_a_rollback_but_no_reader(registry):
    registry, (a, b, _) = registry
    registry.promote(a)
    registry.promote(b)
    (registry.folder / "history.jsonl").unlink()
    with pytest.raises(
        ScaleError, match=r"Expected change 1 in .*history.jsonl, got none"
    ):
        registry.rollback()
    with pytest.raises(ScaleError, match="Expected change 1"):
        registry.remove(a)
    assert registry.live_id() == b
    assert [x.artifact_id for x in registry.list() if x.live] == [b]


# Killed and concurrent writers.


class Killed(BaseException):
    """Ends a writer the way a signal does, at a point that the test chooses."""


def stop_after(patch, steps):
    """Kills the writer at its nth write to the disk; nothing is cleaned up."""
    left = [steps]

    def stop(wrapped):
        def call(*arguments, **options):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return wrapped(*arguments, **options)

        return call

    patch.setattr(files.os, "fsync", stop(files.os.fsync))
    for name in ("rename", "replace", "mkdir"):
        patch.setattr(files.Path, name, stop(getattr(files.Path, name)))
    patch.setattr(files.Path, "unlink", lambda *_, **__: None)
    patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)


@pytest.mark.parametrize("action", ["add", "promote", "rollback", "remove"])
def test_a_writer_killed_at_any_point_leaves_the_old_state_or_the_new(
    tmp_path, artifacts, monkeypatch, action
):
    for survived in range(40):
        registry = Registry(tmp_path / str(survived))
        a, b = map(registry.add, artifacts[:2])
        registry.promote(a)
        registry.promote(b)
        act, old, new = {
            "add": (functools.partial(registry.add, artifacts[2]), b, b),
            "promote": (functools.partial(registry.promote, a), b, a),
            "rollback": (registry.rollback, b, a),
            "remove": (functools.partial(registry.remove, b, force=True), b, None),
        }[action]
        with monkeypatch.context() as patch:
            stop_after(patch, survived)
            try:
                act()
            except Killed:
                finished = False
            else:
                finished = True
        live = registry.live_id()
        assert live in (old, new)
        if live is not None:
            read_artifact(registry.live_folder())
        assert all(x.problem is None for x in registry.list())
        assert len(registry.history()) in (2, 3)
        # And the next writer goes on as if nothing had happened.
        registry.add(artifacts[2])
        c = registry.promote(registry.list()[0].artifact_id)
        assert registry.rollback() == (a if live is None else live)
        assert registry.history()[-2].artifact_id == c
        assert not [x for x in os.listdir(registry.folder) if files.LEFTOVER in x]
        if finished:
            assert survived >= 3
            assert live == new
            return
    raise AssertionError("the writer never finished")


def test_a_torn_line_of_the_history_is_not_a_change(registry):
    registry, (a, b, c) = registry
    registry.promote(a)
    with (registry.folder / "history.jsonl").open("ab") as file:
        file.write(b'{"number": 2, "action": "promote", "artif')
    registry.promote(b)
    registry.promote(c)
    assert [x.artifact_id for x in registry.history()] == [a, b, c]
    assert registry.rollback() == b


def test_a_change_that_never_took_effect_is_not_history(registry):
    registry, (a, b, c) = registry
    registry.promote(a)
    registry.promote(b)
    path = registry.folder / "history.jsonl"
    lost = json.loads(path.read_text().splitlines()[-1]) | {"number": 3, "back": 2}
    with path.open("a") as file:  # its writer was killed before the swap
        file.write(json.dumps(lost | {"artifact_id": a}) + "\n")
    registry.promote(c)
    assert [x.artifact_id for x in registry.history()] == [a, b, c]


def test_writers_wait_for_each_other_and_readers_for_nobody(registry):
    registry, ids = registry
    registry.promote(ids[0])
    reads = []

    def write(worker):
        for step in range(8):
            Registry(registry.folder).promote(ids[(worker + step) % 3])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, worker) for worker in range(3)]
        while not all(writer.done() for writer in writers):
            reads.append(read_artifact(registry.live_folder())[1].artifact_id)
        for writer in writers:
            writer.result()
    assert set(reads) <= set(ids)
    history = registry.history()
    assert [x.number for x in history] == list(range(1, len(history) + 1))
    assert history[-1].artifact_id == registry.live_id()


def test_a_process_killed_at_work_leaves_a_registry_that_works(registry):
    registry, ids = registry
    code = f"""
import itertools
from fp8kv_jax.scales.registry import Registry
registry = Registry({str(registry.folder)!r})
for name in itertools.cycle({ids!r}):
    registry.promote(name)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    while len(registry.history()) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert read_artifact(registry.live_folder())[1].artifact_id in ids
    assert registry.history()[-1].artifact_id == registry.live_id()
    registry.rollback()
