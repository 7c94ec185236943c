"""Artifacts: exact round trips, whole or absent, and closed to what does not fit."""

import dataclasses
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from artifact_examples import (
    NUM_KV_HEADS,
    NUM_LAYERS,
    assert_same_scales,
    change_manifest,
    change_tensors,
    evidence,
    identity,
    manifest_of,
    reseal,
    scale_set,
    write_example,
)

from fp8kv_jax.scales import files
from fp8kv_jax.scales.artifact import (
    MANIFEST_NAME,
    SCALES_NAME,
    add_evidence,
    check_against_model,
    copy_artifact,
    read_artifact,
    write_artifact,
)
from fp8kv_jax.scales.scale_set import ScaleError
from fp8kv_jax.scales.tensors import KINDS, scale_set_from_dict, to_tensors

LAYERS = "0, 1, 2, 3"


# Round trips.


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_an_artifact_reads_back_bit_for_bit(tmp_path, granularity):
    scales, manifest = write_example(tmp_path / "a" / "b", granularity)
    read, read_manifest = read_artifact(tmp_path / "a" / "b")
    assert_same_scales(read, scales)
    assert read_manifest == manifest


def test_the_same_scales_give_the_same_bytes(tmp_path):
    for name in "ab":
        write_example(tmp_path / name, created_at=f"2026-01-0{ord(name) % 9}T00:00:00Z")
    one, other = ((tmp_path / name / SCALES_NAME).read_bytes() for name in "ab")
    assert one == other
    manifests = [read_artifact(tmp_path / name)[1] for name in "ab"]
    assert manifests[0].artifact_id == manifests[1].artifact_id
    assert manifests[0] != manifests[1]


def test_the_file_holds_what_the_documentation_says(tmp_path):
    scales, _ = write_example(tmp_path / "a")
    tensors = safetensors.numpy.load_file(tmp_path / "a" / SCALES_NAME)
    names = {f"layers.{i}.{kind}" for i in range(NUM_LAYERS) for kind in KINDS}
    assert set(tensors) == names
    for tensor in tensors.values():
        assert (tensor.dtype, tensor.shape) == (np.float32, (NUM_KV_HEADS,))
    np.testing.assert_array_equal(tensors["layers.2.v_amax"], scales.v_amax[2])


def test_unknown_amax_survives(tmp_path):
    scales = dataclasses.replace(scale_set(), k_amax=np.full((4, 3), np.nan, "f4"))
    write_artifact(tmp_path / "a", scales, manifest_of(scales))
    assert_same_scales(read_artifact(tmp_path / "a")[0], scales)


def test_a_scale_set_goes_through_orbax_bit_for_bit(tmp_path):
    scales = scale_set(layers=(0, 3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", to_tensors(scales))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint")
    assert_same_scales(scale_set_from_dict(restored, granularity="head"), scales)


def test_the_inverse_that_was_saved_is_the_one_that_is_read(tmp_path):
    scales = scale_set()
    # As another device's division may round it.
    nudged = np.nextafter(scales.k_inv_scale, np.float32(np.inf))
    scales = dataclasses.replace(scales, k_inv_scale=nudged)
    write_artifact(tmp_path / "a", scales, manifest_of(scales))
    assert_same_scales(read_artifact(tmp_path / "a")[0], scales)


# Writing: whole or not at all.


def test_nothing_is_overwritten_unasked(tmp_path):
    write_example(tmp_path / "a")
    with pytest.raises(ScaleError, match="a not to exist, got something there"):
        write_example(tmp_path / "a", seed=1)
    other = scale_set(seed=1)
    write_artifact(tmp_path / "a", other, manifest_of(other), overwrite=True)
    assert_same_scales(read_artifact(tmp_path / "a")[0], other)
    assert [x.name for x in tmp_path.iterdir()] == ["a"]


def test_overwriting_spares_what_is_no_artifact(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    scales = scale_set()
    with pytest.raises(ScaleError, match="to be an artifact, to overwrite it"):
        write_artifact(tmp_path, scales, manifest_of(scales), overwrite=True)
    assert (tmp_path / "thesis.txt").exists()


def test_scales_that_the_manifest_does_not_describe_are_not_written(tmp_path):
    with pytest.raises(ScaleError, match="granularity"):
        write_artifact(tmp_path / "a", scale_set("tensor"), manifest_of(scale_set()))
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Ends a writer the way a signal does, at a point that the test chooses."""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_writer_leaves_a_whole_artifact_or_none(
    tmp_path, monkeypatch, overwrite
):
    """Stops after each step; nothing is cleaned up, as after kill -9."""
    old, new = scale_set(seed=0), scale_set(seed=1)
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    for survived in range(20):
        folder = tmp_path / str(survived) / "a"
        if overwrite:
            write_artifact(folder, old, manifest_of(old))
        with monkeypatch.context() as patch:
            _die_after(patch, survived)
            try:
                write_artifact(folder, new, manifest_of(new), overwrite=overwrite)
            except Killed:
                finished = False
            else:
                finished = True
        if folder.exists():
            wanted = (old, new) if overwrite else (new,)
            found = read_artifact(folder)[0]
            assert any(np.array_equal(found.k_scale, x.k_scale) for x in wanted)
        if finished:
            assert survived >= 4  # two files and two folders were synced
            return
    raise AssertionError("the writer never finished")


def _die_after(patch, steps):
    """Kills the writer at its nth sync or rename."""
    left = [steps]

    def stop(wrapped):
        def call(*arguments):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return wrapped(*arguments)

        return call

    patch.setattr(files.os, "fsync", stop(files.os.fsync))
    patch.setattr(files.Path, "rename", stop(files.Path.rename))


def test_evidence_is_appended_and_the_id_stays(tmp_path):
    _, manifest = write_example(tmp_path / "a")
    add_evidence(tmp_path / "a", evidence())
    add_evidence(tmp_path / "a", evidence(verdict="expired"))
    _, read = read_artifact(tmp_path / "a")
    assert [x.verdict for x in read.evidence] == ["fits", "expired"]
    assert read.artifact_id == manifest.artifact_id
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_a_copy_is_byte_for_byte(tmp_path):
    write_example(tmp_path / "a")
    copy_artifact(tmp_path / "a", tmp_path / "b")
    for name in (SCALES_NAME, MANIFEST_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes()
    with pytest.raises(ScaleError, match=r"c: Expected scales.safetensors to be"):
        copy_artifact(tmp_path / "c", tmp_path / "d")


# Reading: closed to what does not fit.


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_case_34_all_scales_zero_is_an_error_that_lists_the_layers(tmp_path):
    tensors = to_tensors(scale_set())
    zero = {name: np.zeros_like(x) for name, x in tensors.items() if "_scale" in name}
    with pytest.raises(ScaleError, match=f"k_scale .* in layers {LAYERS}"):
        scale_set_from_dict(tensors | zero, granularity="head")
    write_example(tmp_path / "a")
    change_tensors(tmp_path / "a", lambda tensors: tensors.update(zero))
    with pytest.raises(ScaleError, match=f"k_scale .* in layers {LAYERS}"):
        read_artifact(tmp_path / "a")


def test_case_35_scales_of_exactly_one_load_with_a_warning(tmp_path):
    ones = scale_set_of_ones()
    write_artifact(tmp_path / "a", ones, manifest_of(ones, rule="given"))
    with pytest.warns(UserWarning, match=r"Every scale is exactly 1\.0.*floors"):
        read, _ = read_artifact(tmp_path / "a")
    assert_same_scales(read, ones)
    nearly = to_tensors(ones)
    nearly["layers.2.v_scale"] = np.array([1, 1, 1.0000001], np.float32)
    scale_set_from_dict(nearly, granularity="head")  # warnings are errors here


def scale_set_of_ones():
    ones = np.ones((NUM_LAYERS, NUM_KV_HEADS), np.float32)
    names = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale")
    return dataclasses.replace(scale_set(), **dict.fromkeys(names, ones))


def test_case_36_an_artifact_may_cover_some_layers_and_names_the_others(tmp_path):
    model = identity(num_layers=12)
    scales = scale_set(layers=(3, 7, 11))
    written = write_artifact(tmp_path / "a", scales, manifest_of(scales, model=model))
    assert written.skipped_layers == (0, 1, 2, 4, 5, 6, 8, 9, 10)
    read, manifest = read_artifact(tmp_path / "a")
    assert read.layers == (3, 7, 11)
    assert check_against_model(read, manifest, model) == []
    change_manifest(tmp_path / "a", lambda m: m["skipped_layers"].remove(5))
    with pytest.raises(ScaleError, match=r"each of the model's 12 layers.*layers 5\."):
        read_artifact(tmp_path / "a")


@pytest.mark.parametrize(
    "value",
    [
        0.25,
        np.float32(0.25),
        np.float64(0.25),
        np.array(0.25, np.float32),
        np.array([0.25], np.float32),
        np.full((1, 1, 1), 0.25, np.float32),
        np.array([0.25], jnp.bfloat16),
        np.array([0.25], np.float16),
        jnp.array(0.25, jnp.bfloat16),
        [0.25],
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}-{np.shape(x)}",
)
def test_case_38_one_scale_in_any_shape_and_type_is_the_same(value):
    found = scale_set_from_dict(
        {"layers.0.k_scale": value, "layers.0.v_scale": 0.5}, granularity="tensor"
    )
    assert found.k_scale.dtype == np.float32
    assert found.k_scale.tolist() == [[0.25]]
    assert found.k_inv_scale.tolist() == [[4.0]]
    assert np.isnan(found.k_amax).all()


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3, 1, 1)])
def test_case_38_a_scale_for_each_head_in_any_shape_is_the_same(shape):
    scale = np.array([0.25, 0.5, 1], jnp.bfloat16).reshape(shape)
    found = scale_set_from_dict(
        {"layers.0.k_scale": scale, "layers.0.v_scale": scale}, granularity="head"
    )
    assert found.k_scale.tolist() == [[0.25, 0.5, 1]]


@pytest.mark.parametrize(
    ("value", "granularity", "message"),
    [
        (
            np.ones(3, np.float32),
            "tensor",
            "Expected 1 groups for granularity 'tensor'",
        ),
        (np.ones((2, 2), np.float32), "head", "k_scale to be one number, or one for"),
        (np.ones(0, np.float32), "tensor", "k_scale to be one number, or one for"),
    ],
)
def test_case_38_another_shape_is_an_error_that_names_the_layer(
    value, granularity, message
):
    tensors = {"layers.5.k_scale": value, "layers.5.v_scale": value}
    with pytest.raises(ScaleError, match=f"{message}.* layers 5"):
        scale_set_from_dict(tensors, granularity=granularity)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "a text"])
@pytest.mark.parametrize("kind", ["k_scale", "v_scale"])
def test_case_39_a_bad_value_is_one_error_by_file_and_by_dict(tmp_path, kind, bad):
    name = f"layers.2.{kind}"

    def spoil(tensors):
        if isinstance(bad, str):  # the only way to put a text into a tensor file
            tensors[name] = np.frombuffer(bad.encode(), np.uint8)
        else:
            tensors[name] = np.array([0.5, bad, 0.5], np.float32)

    write_example(tmp_path / "a")
    change_tensors(tmp_path / "a", spoil)
    with pytest.raises(ScaleError) as by_file:
        read_artifact(tmp_path / "a")
    tensors = to_tensors(scale_set())
    spoil(tensors)
    if isinstance(bad, str):
        tensors[name] = bad
    with pytest.raises(ScaleError) as by_dict:
        scale_set_from_dict(tensors, granularity="head")
    message = one_line(by_dict)
    assert one_line(by_file) == f"{tmp_path / 'a'}: {message}"
    assert re.search(
        rf"Expected {kind} to (be finite|hold numbers).* layers 2\.", message
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SCALES_NAME).unlink(), "scales.safetensors .*No such file"),
        (lambda f: (f / MANIFEST_NAME).unlink(), "manifest.json .*No such file"),
        (lambda f: cut(f / SCALES_NAME, 9), r"sha256 .*changed or cut off"),
        (lambda f: cut(f / SCALES_NAME, 0), r"sha256 .*changed or cut off"),
        (lambda f: cut(f / MANIFEST_NAME, 700), r"manifest.json to be JSON"),
        (lambda f: flip(f / SCALES_NAME), r"sha256 .*changed or cut off"),
        (lambda f: (f / MANIFEST_NAME).write_text("{"), "manifest.json to be JSON"),
    ],
)
def test_case_40_a_damaged_file_is_one_line(tmp_path, damage, message):
    write_example(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ScaleError, match=message) as caught:
        read_artifact(tmp_path / "a")
    assert one_line(caught).startswith(f"{tmp_path / 'a'}: Expected ")


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_case_40_another_artifacts_manifest_is_refused(tmp_path):
    write_example(tmp_path / "a")
    write_example(tmp_path / "b", seed=1)
    manifest = (tmp_path / "b" / MANIFEST_NAME).read_bytes()
    (tmp_path / "a" / MANIFEST_NAME).write_bytes(manifest)
    with pytest.raises(ScaleError, match="sha256 that the manifest records"):
        read_artifact(tmp_path / "a")


def test_case_40_a_file_with_a_fitting_checksum_must_still_be_scales(tmp_path):
    write_example(tmp_path / "a")
    (tmp_path / "a" / SCALES_NAME).write_bytes(b"\x08\0\0\0\0\0\0\0{}     \n12")
    reseal(tmp_path / "a")
    with pytest.raises(
        ScaleError, match=r"scales.safetensors to be a safetensors file"
    ):
        read_artifact(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.v_scale"), "v_scale for each layer.*layers 1"),
        (lambda t: t.pop("layers.1.k_inv_scale"), "k_inv_scale for each.*layers 1"),
        (lambda t: t.pop("layers.3.v_amax"), "v_amax for each layer.*layers 3"),
        (lambda t: t.update({"model.k": ONES}), "got 1 others: 'model.k'"),
        (
            lambda t: t.update({"layers.01.k_scale": ONES}),
            "others: 'layers.01.k_scale'",
        ),
        (lambda t: t.update({"layers.9.k_amax": ONES}), "k_amax only .*layers 9"),
        (lambda t: t.update({"layers.2.k_scale": ONES[:1]}), "3 groups .*layers 2"),
        (lambda t: swap(t, "k_scale", "v_scale"), "k_inv_scale to be the reciprocal"),
        (lambda t: swap(t, "k_amax", "v_amax"), r"k_scale to be k_amax \*"),
        (lambda t: t["layers.0.v_amax"].fill(-1), "v_amax to be finite.*layers 0"),
        (lambda t: t["layers.0.v_amax"].fill(0), "no_signal .*layers 0"),
        (lambda t: t.clear(), "at least one layer, got none"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path, change, message):
    write_example(tmp_path / "a")
    change_tensors(tmp_path / "a", change)
    with pytest.raises(ScaleError, match=message) as caught:
        read_artifact(tmp_path / "a")
    one_line(caught)


ONES = np.ones(NUM_KV_HEADS, np.float32)


def swap(tensors, one, other):
    for layer in range(NUM_LAYERS):
        a, b = f"layers.{layer}.{one}", f"layers.{layer}.{other}"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def test_a_dict_may_lack_inverses_and_amax_but_not_of_some_layers():
    tensors = {n: x for n, x in to_tensors(scale_set()).items() if "inv" not in n}
    found = scale_set_from_dict(tensors, granularity="head")
    np.testing.assert_array_equal(found.k_inv_scale, np.float32(1) / found.k_scale)
    with pytest.raises(ScaleError, match=r"k_inv_scale for each layer.*layers 0, 1, 2"):
        scale_set_from_dict(
            tensors | {"layers.3.k_inv_scale": 1 / tensors["layers.3.k_scale"]},
            granularity="head",
        )


# The model that scales are for.


def test_scales_of_this_model_need_no_excuse():
    scales = scale_set()
    assert check_against_model(scales, manifest_of(scales), identity()) == []


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("config_sha256", "config"),
        ("weights_sha256", "weights"),
        ("tokenizer_sha256", "tokenizer"),
        ("chat_template_sha256", "chat template"),
    ],
)
def test_case_40_another_models_scales_are_refused_or_excused(field, part):
    scales = scale_set()
    other = identity(**{field: "9" * 64})
    with pytest.raises(ScaleError) as caught:
        check_against_model(scales, manifest_of(scales), other)
    message = one_line(caught)
    assert (
        f"of another for layers {LAYERS}: they differ in {part} (artifact " in message
    )
    [line] = check_against_model(
        scales, manifest_of(scales), other, allow_mismatch="a test,\nnothing more"
    )
    assert line.startswith(f"other model's {part} (artifact ")
    assert line.endswith("model 999999999999); allowed: a test, nothing more")
    with pytest.raises(ScaleError, match="Expected a reason to allow a mismatch"):
        check_against_model(scales, manifest_of(scales), other, allow_mismatch=" ")


def test_no_reason_makes_scales_fit_a_model_of_fewer_layers_or_heads():
    scales = scale_set()
    for change, message in [
        ({"num_layers": 3}, "got some for layers 3"),
        ({"num_kv_heads": 2}, "Expected 2 groups"),
    ]:
        with pytest.raises(ScaleError, match=message):
            check_against_model(
                scales,
                manifest_of(scales),
                identity(**change),
                allow_mismatch="why not",
            )


def test_the_manifest_is_readable_by_people(tmp_path):
    write_example(tmp_path / "a")
    text = (tmp_path / "a" / MANIFEST_NAME).read_text()
    assert text.endswith("}\n")
    assert '\n  "format_version": 1,\n' in text
    assert json.loads(text)["recipe"]["rule"] == "amax"
