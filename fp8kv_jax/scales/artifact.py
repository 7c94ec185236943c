"""Scales as a folder to deploy: scales.safetensors, and manifest.json beside it."""

import contextlib
import functools
import hashlib
import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import safetensors
import safetensors.numpy

from fp8kv_jax.calibration import (
    CalibrationConfig,
    CalibrationState,
    Granularity,
    scale_per_amax,
)
from fp8kv_jax.scales.files import write_file, write_folder
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.manifest import (
    RULE_AMAX,
    RULE_GIVEN,
    DataManifest,
    Envelope,
    Evidence,
    Manifest,
    make_manifest,
)
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet, short_list
from fp8kv_jax.scales.tensors import KINDS, scale_set_from_dict, to_tensors
from pallas_kernels.fp8 import FP8_MAX

SCALES_NAME = "scales.safetensors"
MANIFEST_NAME = "manifest.json"
# One key: with more of them, safetensors writes a random order.
_METADATA = {"format": "fp8kv_jax.scales.1"}


def write_artifact(
    folder: str | os.PathLike[str],
    scale_set: ScaleSet,
    manifest: Manifest,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Writes an artifact; there is the whole folder afterwards, or nothing new.

    Args:
      folder: where; its parents are made.
      scale_set: the scales.
      manifest: what they are, as `make_manifest` gives it.
      overwrite: replaces an artifact that is there already. A reader may find
        nothing for a moment, but never a part.

    Returns:
      The manifest as written, with the checksum of the scales.

    Raises:
      ScaleError: if scales and manifest disagree, or something is in the way.
      OSError: if the file system refuses.
    """
    manifest.check_fits(scale_set)
    data = safetensors.numpy.save(to_tensors(scale_set), metadata=_METADATA)
    manifest = replace(manifest, scales_sha256=hashlib.sha256(data).hexdigest())
    files = {SCALES_NAME: data, MANIFEST_NAME: manifest.to_json()}
    folder = Path(folder)
    if overwrite and os.path.lexists(folder) and not is_artifact(folder):
        raise ScaleError(f"Expected {folder} to be an artifact, to overwrite it.")
    write_folder(folder, files, replaces=overwrite)
    return manifest


def read_artifact(
    folder: str | os.PathLike[str],
) -> tuple[ScaleSet, Manifest]:
    """Reads an artifact and checks all of it.

    Raises:
      ScaleError: in one line, if anything is missing, damaged or does not fit.

    Warns:
      UserWarning: if every scale is exactly 1.0.
    """
    folder = Path(folder)
    with naming(folder):
        manifest = Manifest.from_json(_read(folder / MANIFEST_NAME))
        data = _read(folder / SCALES_NAME)
        found = hashlib.sha256(data).hexdigest()
        if found != manifest.scales_sha256:
            raise ScaleError(
                f"Expected {SCALES_NAME} to have the sha256 that the manifest records, "
                f"{str(manifest.scales_sha256)[:12]}..., got {found[:12]}...: the file "
                "was changed or cut off."
            )
        scale_set = _parse_scales(data, manifest)
    return scale_set, manifest


def _parse_scales(data: bytes, manifest: Manifest) -> ScaleSet:
    try:
        tensors = safetensors.numpy.load(data)
    # The library's own error, and numpy's for a type it does not have.
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ScaleError(
            f"Expected {SCALES_NAME} to be a safetensors file, got {reason}."
        ) from None
    granularity = manifest.recipe.granularity
    scale_set = scale_set_from_dict(tensors, granularity=granularity, complete=True)
    manifest.check_fits(scale_set)
    return scale_set


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ScaleError(
            f"Expected {path.name} to be a readable file, got {error.strerror}."
        ) from None


@contextlib.contextmanager
def naming(folder: Path) -> Generator[None]:
    """Puts the folder's name before the message of a ScaleError."""
    try:
        yield
    except ScaleError as error:
        raise ScaleError(f"{folder}: {error}") from None


def add_evidence(folder: str | os.PathLike[str], evidence: Evidence) -> Manifest:
    """Appends to an artifact's evidence, the one part that grows; its id stays.

    The manifest is swapped as a whole. Of two writers at a time one may be lost.

    Returns:
      The manifest as written.

    Raises:
      ScaleError: as `read_artifact` does.
      OSError: if the file system refuses.
    """
    _, manifest = read_artifact(folder)
    manifest = replace(manifest, evidence=(*manifest.evidence, evidence))
    write_file(Path(folder) / MANIFEST_NAME, manifest.to_json())
    return manifest


def check_against_model(
    scale_set: ScaleSet,
    manifest: Manifest,
    identity: ModelIdentity,
    *,
    allow_mismatch: str | None = None,
) -> list[str]:
    """Refuses scales that were made for another model.

    Args:
      scale_set: the scales.
      manifest: what they are.
      identity: the model that is to use them.
      allow_mismatch: a reason to use them in spite of a difference. Scales that
        cannot be applied, for want of layers or heads, are refused all the same.

    Returns:
      A line for each difference that was allowed, with the reason; for the run's
      output.

    Raises:
      ScaleError: naming the layers and every part of the model that differs.
    """
    if allow_mismatch is not None and not allow_mismatch.strip():
        raise ScaleError("Expected a reason to allow a mismatch, got an empty one.")
    heads = identity.num_kv_heads
    scale_set.check(num_layers=identity.num_layers, num_kv_heads=heads)
    different = [
        f"{part} (artifact {theirs}, model {ours})"
        for part, (theirs, ours) in manifest.model.differences(identity).items()
    ]
    if different and allow_mismatch is None:
        raise ScaleError(
            f"Expected scales of this model, got some of another for layers "
            f"{short_list(scale_set.layers)}: they differ in {', '.join(different)}. "
            "To use them all the same, give a reason (allow_mismatch)."
        )
    reason = " ".join((allow_mismatch or "").split())
    return [f"other model's {part}; allowed: {reason}" for part in different]


def from_state(
    state: CalibrationState,
    config: CalibrationConfig,
    model: ModelIdentity,
    *,
    envelope: Envelope | None = None,
    parent: str | None = None,
    created_at: str | None = None,
) -> tuple[ScaleSet, Manifest]:
    """Takes the scales of a running loop, as they are, for `write_artifact`.

    Every FP8 layer is covered. A group without signal carries the provisional scale,
    with amax 0, and is listed in the manifest: whoever loads the artifact reads with
    what the loop read with, and can see that it rests on nothing. A group whose scale
    was given without an amax has an unknown one. The rule is "amax" if all scales
    follow from their amax by the loop's headroom, also after `recalibrate`, and
    otherwise "given", with no headroom.

    Args:
      state: the frozen state; read from the device here.
      config: what it was made with.
      model: the model that ran.
      envelope: the traffic, as far as the loop knows it.
      parent: id of the artifact that the loop's own scales came from.
      created_at: the present time by default.

    Raises:
      ScaleError: if the scales are not frozen, or there are none.
      ValueError: if the state was not made with `config`.
    """
    seen, frozen, per_amax = jax.device_get(
        (state.tokens_seen, state.frozen, state.scale_per_amax)
    )
    if not frozen:
        raise ScaleError(
            f"Expected frozen scales, got {int(seen)} of {int(state.window)} tokens of "
            f"the window seen: those of layers {short_list(state.fp8_layers)} are "
            "provisional."
        )
    if per_amax != scale_per_amax(config.headroom):
        raise ValueError(
            f"Expected a state made with headroom {config.headroom}, as config says, "
            f"got one made with {float(per_amax) * FP8_MAX:.6g}."
        )
    one_head = model.num_kv_heads == 1 and config.granularity == "head"
    per_head = one_head or state.k_scale.shape[1] > 1
    scale_set = _scales_of(state, "head" if per_head else "tensor")
    make = functools.partial(
        make_manifest,
        scale_set,
        model,
        data=DataManifest(source="online", tokens_seen=int(seen)),
        envelope=envelope,
        parent=parent,
        created_at=created_at,
    )
    try:
        return scale_set, make(rule=RULE_AMAX, headroom=config.headroom)
    except ScaleError:  # another error comes again
        return scale_set, make(rule=RULE_GIVEN, headroom=None)


def _scales_of(state: CalibrationState, granularity: Granularity) -> ScaleSet:
    arrays = jax.device_get({kind: getattr(state, kind) for kind in KINDS})
    arrays = {kind: np.array(values) for kind, values in arrays.items()}
    for name in ("k_amax", "v_amax"):
        # In a layer that does not calibrate, 0 stands for what nobody said.
        unknown = ~state.calibrates & (arrays[name] == 0)
        arrays[name][unknown] = np.nan
    scale_set = ScaleSet(layers=state.fp8_layers, granularity=granularity, **arrays)
    scale_set.check()
    return scale_set


def is_artifact(folder: Path) -> bool:
    """Says whether a folder looks like an artifact; reads nothing."""
    return (folder / MANIFEST_NAME).is_file() and (folder / SCALES_NAME).is_file()


def copy_artifact(source: Path, target: Path) -> None:
    """Copies an artifact byte for byte, as a whole or not at all.

    Raises:
      ScaleError: if it cannot be read, or something is in the way.
      OSError: if the file system refuses.
    """
    with naming(source):
        files = {name: _read(source / name) for name in (SCALES_NAME, MANIFEST_NAME)}
    write_folder(target, files)
