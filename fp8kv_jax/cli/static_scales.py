"""Scales from an artifact for a run: read, checked against the model, laid over layers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8kv_jax.calibration import CalibrationConfig, CalibrationState
from fp8kv_jax.cli import options
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.scales.artifact import (
    check_against_model,
    from_state,
    read_artifact,
    write_artifact,
)
from fp8kv_jax.scales.manifest import Envelope, Percentiles
from fp8kv_jax.scales.registry import find_artifact
from fp8kv_jax.scales.scale_set import ScaleSet

if TYPE_CHECKING:
    from models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class StaticScales:
    """Scales that a run uses, and where they come from.

    Attributes:
      scale_set: scales of the covered layers.
      uncovered: layers of the model that the artifact skips.
      artifact_id: the artifact's id.
      path: its folder.
      allowed_mismatches: differences from the model that were accepted, with reason.
    """

    scale_set: ScaleSet
    uncovered: tuple[int, ...]
    artifact_id: str
    path: Path
    allowed_mismatches: list[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "artifact_id": self.artifact_id,
            "path": str(self.path),
            "covered_layers": list(self.scale_set.layers),
            "uncovered_layers": list(self.uncovered),
            "allowed_mismatches": self.allowed_mismatches,
        }


def follow_scales(
    static: StaticScales,
    calibration: CalibrationConfig,
    high_precision_layers: tuple[int, ...],
    uncovered: options.UncoveredLayers,
) -> dict[str, Any]:
    """What of a request follows the scales, as changes for `replace`.

    Their granularity is the run's; layers that they skip keep the compute dtype,
    unless these are to calibrate online.
    """
    kept = set(high_precision_layers)
    if uncovered == "bf16":
        kept.update(static.uncovered)
    return {
        "calibration": replace(calibration, granularity=static.scale_set.granularity),
        "high_precision_layers": tuple(sorted(kept)),
    }


def load_scales(
    path: Path, model: "LoadedModel", *, allow_mismatch: str | None
) -> StaticScales:
    """Reads an artifact, or a registry's live one, for a model.

    Raises:
      UserError: if there is none, it is not sound, or it is another model's.
    """
    with checking_input():
        try:
            folder = find_artifact(path)
            scale_set, manifest = read_artifact(folder)
        except OSError as error:
            raise UserError(f"Expected {path} to be readable: {error}.") from error
        allowed = check_against_model(
            scale_set, manifest, identify(model), allow_mismatch=allow_mismatch
        )
    layers = range(model.config.num_layers)
    return StaticScales(
        scale_set=scale_set,
        uncovered=tuple(i for i in layers if i not in scale_set.layers),
        artifact_id=manifest.artifact_id,
        path=folder,
        allowed_mismatches=allowed,
    )


def save_scales(
    folder: Path,
    model: "LoadedModel",
    state: CalibrationState,
    config: CalibrationConfig,
    *,
    parent: str | None,
    lengths: list[tuple[int, int]],
) -> str:
    """Writes what a run froze as an artifact.

    Args:
      folder: where it goes; must not be there yet.
      model: the model that ran.
      state: the run's final state.
      config: what the state was made with.
      parent: id of the artifact that the run's own scales came from.
      lengths: prompt and output tokens of each sequence.

    Returns:
      The artifact's id.

    Raises:
      UserError: if the scales never froze, or the folder cannot be written.
    """
    prompts, outputs = zip(*lengths, strict=True)
    envelope = Envelope(
        longest_context=max(map(sum, lengths)),
        prompt_lengths=Percentiles.of(prompts),
        output_lengths=Percentiles.of(outputs),
    )
    with checking_input():
        scale_set, manifest = from_state(
            state, config, identify(model), envelope=envelope, parent=parent
        )
        try:
            return write_artifact(folder, scale_set, manifest).artifact_id
        except OSError as error:
            raise UserError(f"Expected to write {folder}: {error.strerror}.") from error


def check_flags(
    scales: Path | None,
    uncovered: options.UncoveredLayers,
    allow_mismatch: str | None,
    dtype: options.KvCacheDtype,
    save_to: Path | None,
) -> None:
    """Refuses flags that contradict each other."""
    if save_to is not None and (dtype != "fp8" or save_to.exists()):
        raise UserError(
            "Expected --save-fp8-kv-scales to name a new folder, and "
            f"--kv-cache-dtype fp8, got {save_to} and {dtype.value}."
        )
    if scales is not None and dtype != "fp8":
        raise UserError(
            f"Expected --kv-cache-dtype fp8 with --fp8-kv-scales, got {dtype.value}: a "
            "wider cache has no scales."
        )
    if scales is None and (allow_mismatch is not None or uncovered != "bf16"):
        raise UserError(
            "Expected --fp8-kv-scales with --allow-mismatch or "
            "--fp8-kv-uncovered-layers, got none."
        )
