"""What some scales are, where they come from and what they cover; kept beside them.

`manifest.schema.json` describes the same JSON for other programs.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np

from fp8kv_jax.calibration import scale_of, scale_per_amax
from fp8kv_jax.scales.fields import (
    ArtifactId,
    Checked,
    Count,
    Limits,
    Name,
    Positive,
    Sha256,
    UtcTime,
    Word,
    canonical_json,
    decode,
    parse_json,
    shown,
)
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet, short_list

FORMAT_VERSION = 1
SCHEMA_PATH = Path(__file__).with_name("manifest.schema.json")
# How a scale follows from what was observed. "given": it does not follow from the
# amax beside it (imported, or set by hand).
RULE_AMAX, RULE_GIVEN = "amax", "given"
# Not part of an artifact's name.
_NOT_IN_ID = ("evidence", "library_versions", "created_at")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile(Checked):
    """A file that calibration read.

    Attributes:
      name: its name, relative to what the user gave; no machine's path.
      sha256: of its bytes.
      num_bytes: its size.
      data_class: the class it was given for, None without one.
    """

    name: Name
    sha256: Sha256
    num_bytes: Count
    data_class: Name | None

    @classmethod
    def of(cls, path: Path, *, name: str, data_class: str | None = None) -> Self:
        """Reads and hashes a file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(
            name=name,
            sha256=digest,
            num_bytes=path.stat().st_size,
            data_class=data_class,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassCount(Checked):
    """How much of one data class was observed."""

    samples: Count
    tokens: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class DataManifest(Checked):
    """What the scales rest on. None means that nobody knows.

    Attributes:
      source: "files" (offline calibration), "online" (the window of a running loop)
        or "imported" (somebody else's scales; `files` are theirs).
      files: what was read; empty for "online".
      classes: what was observed, by data class.
      num_samples: texts observed.
      tokens_seen: tokens observed.
      seed: what sampling depended on.
      max_length: tokens at which texts were cut.
    """

    source: Literal["files", "online", "imported"]
    files: tuple[DataFile, ...] = ()
    classes: dict[str, ClassCount] | None = None
    num_samples: Count | None = None
    tokens_seen: Count | None = None
    seed: int | None = None
    max_length: Positive | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Checked):
    """How scales were made of what was observed.

    Attributes:
      granularity: "tensor" or "head", as in `CalibrationConfig`.
      rule: "amax": `scale = clip(amax * float32(headroom / 448))`; "given": it does
        not follow from the amax. Other rules may come.
      headroom: None where unknown.
      fp8_format: what the scales are for.
    """

    granularity: Literal["tensor", "head"]
    rule: Word = RULE_AMAX
    headroom: Annotated[float, Limits(minimum=1, meaning="a ratio from 1 on")] | None
    fp8_format: Literal["e4m3fn"] = "e4m3fn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles(Checked):
    """Lengths in tokens, without interpolation."""

    p50: Count
    p90: Count
    p99: Count
    max: Count

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Self | None:
        """Percentiles of some lengths; None of none."""
        if not len(lengths):
            return None
        found = np.percentile(lengths, [50, 90, 99, 100], method="inverted_cdf")
        p50, p90, p99, longest = (int(x) for x in found)
        return cls(p50=p50, p90=p90, p99=p99, max=longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope(Checked):
    """The traffic that the scales were made for. None means that nobody knows.

    Attributes:
      longest_context: most tokens of a sequence.
      prompt_lengths, output_lengths: percentiles, in tokens.
      classes: data classes.
      languages: of the texts.
    """

    longest_context: Count | None = None
    prompt_lengths: Percentiles | None = None
    output_lengths: Percentiles | None = None
    classes: tuple[Name, ...] | None = None
    languages: tuple[Name, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoSignal(Checked):
    """A group that saw only zeros: its scale is the provisional one, on no evidence."""

    layer: Count
    tensor: Literal["k", "v"]
    group: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence(Checked):
    """What a check of the scales found, such as a drift replay.

    Attributes:
      kind: which check.
      created_at: when.
      verdict: its outcome in a word.
      summary: its numbers, any JSON object.
    """

    kind: Word
    created_at: UtcTime
    verdict: Word
    summary: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Checked):
    """All that is known of some scales; `make_manifest` builds one.

    Attributes:
      model: the model they are for.
      data: what they rest on.
      recipe: how they were made.
      envelope: the traffic they are for.
      skipped_layers: layers of the model without scales.
      no_signal: groups whose scales rest on nothing.
      evidence: results of later checks, oldest first.
      library_versions: version by package.
      created_at: when.
      parent: id of the artifact these scales were made from.
      scales_sha256: checksum of scales.safetensors; None until written.
      format_version: of the JSON.
    """

    model: ModelIdentity
    data: DataManifest
    recipe: Recipe
    envelope: Envelope
    skipped_layers: tuple[Count, ...]
    no_signal: tuple[NoSignal, ...]
    evidence: tuple[Evidence, ...] = ()
    library_versions: dict[str, str]
    created_at: UtcTime
    parent: ArtifactId | None = None
    scales_sha256: Sha256 | None = None
    format_version: Count = FORMAT_VERSION

    def __post_init__(self) -> None:
        # Without arguments, super() does not find a class that slots made anew.
        Checked.__post_init__(self)
        try:
            datetime.datetime.fromisoformat(self.created_at)
        except ValueError:
            raise ScaleError(
                "Expected Manifest.created_at to be a date of the calendar, got "
                f"{self.created_at!r}."
            ) from None

    @property
    def artifact_id(self) -> str:
        """Names the artifact by what the scales are and rest on.

        Covers everything, the scales' checksum included, but when and by which
        versions it was written, and the evidence, which grows. So the same
        calibration done twice gives the same id, and an edited manifest shows.
        """
        covered = {k: v for k, v in self._fields().items() if k not in _NOT_IN_ID}
        return hashlib.sha256(canonical_json(covered).encode()).hexdigest()[:16]

    def to_json(self) -> bytes:
        """The file's bytes.

        Raises:
          ScaleError: if the scales' checksum is not known yet.
        """
        if self.scales_sha256 is None:
            raise ScaleError("Expected Manifest.scales_sha256 to be set, got None.")
        fields = self._fields()
        first = {"format_version": fields.pop("format_version")}
        first["artifact_id"] = self.artifact_id
        return (json.dumps(first | fields, indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Reads the file's bytes, strictly.

        Raises:
          ScaleError: in one line that names the field: not JSON, another format
            version, a field missing, unknown, mistyped or out of range, or an
            artifact id that does not fit the rest.
        """
        value = parse_json(data, "manifest.json")
        if not isinstance(value, dict):
            raise ScaleError("Expected manifest.json to be a JSON object.")
        version = value.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool | float):
            raise ScaleError(
                f"Expected manifest.format_version to be {FORMAT_VERSION}, the one "
                f"this version reads, got {shown(version)}."
            )
        if "artifact_id" not in value:
            raise ScaleError("Expected manifest.artifact_id, got no such field.")
        recorded = decode(ArtifactId, value.pop("artifact_id"), "manifest.artifact_id")
        manifest = decode(cls, value, "manifest")
        if manifest.scales_sha256 is None:
            raise ScaleError("Expected manifest.scales_sha256 to be set, got None.")
        if recorded != manifest.artifact_id:
            raise ScaleError(
                f"Expected manifest.artifact_id to be {manifest.artifact_id}, which "
                f"follows from the rest, got {recorded}: the manifest was changed."
            )
        return manifest

    def _fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def check_fits(self, scale_set: ScaleSet) -> None:
        """Refuses scales that are not the ones described here.

        Raises:
          ScaleError: naming the field and the layers.
        """
        scale_set.check(
            num_layers=self.model.num_layers, num_kv_heads=self.model.num_kv_heads
        )
        if scale_set.granularity != self.recipe.granularity:
            raise ScaleError(
                "Expected manifest.recipe.granularity to be "
                f"{scale_set.granularity!r}, that of the scales, got "
                f"{self.recipe.granularity!r}."
            )
        self._check_layers(scale_set.layers)
        silent = no_signal_groups(scale_set)
        if set(self.no_signal) != set(silent):
            differ = sorted({s.layer for s in set(self.no_signal) ^ set(silent)})
            raise ScaleError(
                "Expected manifest.no_signal to list the groups whose amax is 0, but "
                f"they differ in layers {short_list(differ)}."
            )
        if self.recipe.rule == RULE_AMAX:
            _check_amax_rule(scale_set, self.recipe.headroom)

    def _check_layers(self, covered: Sequence[int]) -> None:
        both = sorted(set(covered) & set(self.skipped_layers))
        if both:
            raise ScaleError(
                "Expected manifest.skipped_layers to list layers without scales, but "
                f"layers {short_list(both)} have some."
            )
        known = set(covered) | set(self.skipped_layers)
        # Counted first: a damaged num_layers may be astronomic.
        if len(known) != self.model.num_layers or max(known) >= self.model.num_layers:
            extra = sorted(i for i in known if i >= self.model.num_layers)
            lacking = (i for i in range(self.model.num_layers) if i not in known)
            named = extra or list(itertools.islice(lacking, 13))
            raise ScaleError(
                "Expected scales or an entry in manifest.skipped_layers for each of "
                f"the model's {self.model.num_layers} layers, and for no other; see "
                f"layers {short_list(named)}."
            )


def make_manifest(
    scale_set: ScaleSet,
    model: ModelIdentity,
    *,
    data: DataManifest,
    headroom: float | None,
    rule: str = RULE_AMAX,
    envelope: Envelope | None = None,
    parent: str | None = None,
    created_at: str | None = None,
) -> Manifest:
    """Describes some scales; what follows from them is filled in.

    Args:
      scale_set: the scales.
      model: the model they are for.
      data: what they rest on.
      headroom: see `Recipe`.
      rule: see `Recipe`.
      envelope: the traffic they are for; unknown by default.
      parent: id of the artifact they were made from.
      created_at: the present time by default.

    Raises:
      ScaleError: naming the field, or the layers, that do not fit.
    """
    covered = set(scale_set.layers)
    manifest = Manifest(
        model=model,
        data=data,
        recipe=Recipe(granularity=scale_set.granularity, rule=rule, headroom=headroom),
        envelope=envelope or Envelope(),
        skipped_layers=tuple(i for i in range(model.num_layers) if i not in covered),
        no_signal=no_signal_groups(scale_set),
        library_versions=library_versions(),
        created_at=created_at or utc_now(),
        parent=parent,
    )
    manifest.check_fits(scale_set)
    return manifest


def no_signal_groups(scale_set: ScaleSet) -> tuple[NoSignal, ...]:
    """Groups whose amax is 0: nothing was seen there that a scale could rest on."""
    return tuple(
        NoSignal(layer=scale_set.layers[row], tensor=tensor, group=int(group))
        for tensor, amax in (("k", scale_set.k_amax), ("v", scale_set.v_amax))
        for row, group in np.argwhere(amax == 0)
    )


def _check_amax_rule(scale_set: ScaleSet, headroom: float | None) -> None:
    if headroom is None:
        raise ScaleError(
            "Expected manifest.recipe.headroom to be a number for rule 'amax', got "
            "None."
        )
    for name in "kv":
        amax = getattr(scale_set, f"{name}_amax")
        scale = getattr(scale_set, f"{name}_scale")
        with np.errstate(over="ignore", under="ignore"):
            want = scale_of(amax, scale_per_amax(headroom))
        # NaN, where the amax is unknown, compares false.
        wrong = (abs(scale / want - 1) > 1e-6) & (amax > 0)
        if wrong.any():
            layers = [scale_set.layers[row] for row in np.flatnonzero(wrong.any(1))]
            raise ScaleError(
                f"Expected {name}_scale to be {name}_amax * {headroom} / 448 by the "
                f"manifest's rule 'amax', but it is not in layers {short_list(layers)}."
            )


def library_versions() -> dict[str, str]:
    """Installed versions of what a scale may depend on."""
    versions = {}
    for package in ("fp8kv-jax", "jax", "jaxlib", "flax", "numpy", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def utc_now() -> str:
    """The present time as manifests spell it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
