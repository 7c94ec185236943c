"""What a drift replay found: plain numbers that reports, policies and files start from.

Tables are nested tuples `[layer][head]`, in the order of `RangeReport.layers` (the FP8
layers) or, for attention errors, of all layers of the model. None stands for what
nobody knows, or cannot be computed.
"""

import dataclasses
import json
from typing import Any, Literal, Self

from fp8kv_jax.drift.result_loss import Attribution as Attribution
from fp8kv_jax.drift.result_loss import CacheBytes as CacheBytes
from fp8kv_jax.drift.result_loss import Capacity as Capacity
from fp8kv_jax.drift.result_loss import FormatReport as FormatReport
from fp8kv_jax.drift.result_loss import FormatTrial as FormatTrial
from fp8kv_jax.drift.result_loss import HighPrecisionTrial as HighPrecisionTrial
from fp8kv_jax.drift.result_loss import LayerLoss as LayerLoss
from fp8kv_jax.drift.result_loss import ScaleTrial as ScaleTrial
from fp8kv_jax.drift.result_loss import TwoDrifts as TwoDrifts
from fp8kv_jax.drift.result_quality import GeneratedExample as GeneratedExample
from fp8kv_jax.drift.result_quality import GeneratedReport as GeneratedReport
from fp8kv_jax.drift.result_quality import GeneratedSlice as GeneratedSlice
from fp8kv_jax.drift.result_quality import Misranking as Misranking
from fp8kv_jax.drift.result_quality import PositionCurve as PositionCurve
from fp8kv_jax.drift.result_quality import QualityReport as QualityReport
from fp8kv_jax.drift.result_quality import QualitySlice as QualitySlice
from fp8kv_jax.drift.result_quality import WorstToken as WorstToken
from fp8kv_jax.drift.result_range import Flag as Flag
from fp8kv_jax.drift.result_range import RangeReport as RangeReport
from fp8kv_jax.drift.result_range import RangeSlice as RangeSlice
from fp8kv_jax.drift.result_range import RangeTable as RangeTable
from fp8kv_jax.drift.result_range import Slice as Slice
from fp8kv_jax.scales.fields import (
    Checked,
    Count,
    Positive,
    UtcTime,
    decode,
    parse_json,
)
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.scale_set import ScaleError

SCHEMA_VERSION = 2
_WITHOUT_FORMATS = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactRecord(Checked):
    """The scales that were replayed.

    Attributes:
      artifact_id: the artifact's id.
      scales_sha256: checksum of its tensors.
      granularity: "tensor" or "head".
      headroom: how far above the calibrated amax the scales reach; None if unknown.
      model: the model they were made for.
      calibrated_classes: share of the tokens they rest on, by class; None if unknown.
      longest_context: longest sequence they were calibrated on; None if unknown.
      allowed_mismatches: differences from the model that ran, with the reason.
    """

    artifact_id: str
    scales_sha256: str
    granularity: Literal["tensor", "head"]
    headroom: float | None
    model: ModelIdentity
    calibrated_classes: dict[str, float] | None
    longest_context: int | None
    allowed_mismatches: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share(Checked):
    """How much of a workload one class or language is."""

    name: str
    num_samples: Count
    num_tokens: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRecord(Checked):
    """What was replayed.

    Attributes:
      name: the file's name, without its folder.
      kind: "text" (prompts and chats) or "trace" (recorded keys and values).
      sha256: of the file's bytes.
      num_samples, num_tokens: what ran; longer samples were cut.
      num_cut: samples that were cut to the longest admitted length.
      classes, languages: their shares, in the order of the file.
      short, median, p95, longest: prompt lengths in tokens: the 25th, 50th and 95th
        percentile and the maximum. The slices by prompt length end there.
      num_with_answer: samples that say what answer is expected.
    """

    name: str
    kind: Literal["text", "trace"]
    sha256: str
    num_samples: Count
    num_tokens: Count
    num_cut: Count
    classes: tuple[Share, ...]
    languages: tuple[Share, ...]
    short: Count
    median: Count
    p95: Count
    longest: Count
    num_with_answer: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Checked):
    """What the figures depend on besides model, scales and workload.

    Attributes:
      dtype: what the model computed in; the full-precision cache holds the same.
      platform: "cpu" or "gpu".
      page_size: tokens a page holds.
      tokens_per_step: tokens that went through the model at once.
      high_precision_layers: layers that kept the compute dtype in the FP8 run.
      top_k: how many of the likeliest tokens the misranking looks at.
      small_margin: gap of two logits up to which a flip counts as close.
      max_prompt_tokens: where longer samples were cut.
      num_generated_prompts, max_new_tokens: size of the generation part.
      attribution_samples, attribution_tokens: size of the attribution's sample.
      seed: what the draws of prompts and samples depend on.
    """

    dtype: Literal["float32", "bfloat16"]
    platform: str
    page_size: Positive
    tokens_per_step: Positive
    high_precision_layers: tuple[int, ...]
    top_k: Positive
    small_margin: float
    max_prompt_tokens: Positive
    num_generated_prompts: Count
    max_new_tokens: Count
    attribution_samples: Count
    attribution_tokens: Count
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check(Checked):
    """One bound of the policy, or one trigger, against one slice.

    Attributes:
      name: the policy's field, such as "max_kl_mean", or "trigger:model".
      slice: "overall", or dimension and name such as "class=chat".
      value: what was measured; None for a trigger that is no number.
      limit: what the policy allows.
      outcome: "note" is a trigger that fired and is allowed to.
    """

    name: str
    slice: str
    value: float | None
    limit: float | None
    outcome: Literal["passed", "failed", "note", "skipped"]
    words: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Checked):
    """The policy's word.

    Attributes:
      verdict: "passed" or "failed".
      policy_name, policy_version, policy_sha256: which policy.
      checks: every bound that was looked at.
      reasons: the failed ones, in sentences.
      envelope: in words, what passed: classes, languages, lengths, bounds.
    """

    verdict: Literal["passed", "failed"]
    policy_name: str
    policy_version: str
    policy_sha256: str
    checks: tuple[Check, ...]
    reasons: tuple[str, ...]
    envelope: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult(Checked):
    """Everything that `fp8kv replay` found.

    Parts that did not run are None: model and quality for a trace, `generated`
    without prompts to continue, `attribution` and `drifts` without a sample, `formats`
    if none was asked for.
    """

    created_at: UtcTime
    library_versions: dict[str, str]
    model_name: str
    model: ModelIdentity | None
    artifact: ArtifactRecord
    workload: WorkloadRecord
    settings: Settings
    range: RangeReport
    quality: QualityReport | None
    generated: GeneratedReport | None
    drifts: TwoDrifts | None
    attribution: Attribution | None
    formats: FormatReport | None
    capacity: Capacity
    verdict: Verdict
    seconds: float
    schema_version: Count = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """What JSON shows, the schema's version first."""
        fields = dataclasses.asdict(self)
        return {"schema_version": fields.pop("schema_version")} | fields

    def to_json(self) -> str:
        """One line of JSON, without NaN."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """Reads what `to_json` wrote, strictly; also the version before this one.

        Raises:
          ScaleError: in one line that names the field: not JSON, another schema
            version, or a field missing, unknown, mistyped or out of range.
        """
        data = data.encode() if isinstance(data, str) else data
        value = parse_json(data, "the replay's result")
        version = value.get("schema_version") if isinstance(value, dict) else None
        if version == _WITHOUT_FORMATS:
            value = {"formats": None} | value | {"schema_version": SCHEMA_VERSION}
        elif version != SCHEMA_VERSION:
            raise ScaleError(
                f"Expected schema_version {SCHEMA_VERSION} in the replay's result, "
                f"got {version!r}."
            )
        return decode(cls, value, "result")
