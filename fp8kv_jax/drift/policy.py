"""Policies: which figures of a replay are good enough, and what calls for a new one."""

import dataclasses
import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fp8kv_jax.drift.result import (
    ArtifactRecord,
    Check,
    GeneratedReport,
    QualityReport,
    QualitySlice,
    RangeReport,
    RangeSlice,
    Settings,
    Slice,
    Verdict,
    WorkloadRecord,
)
from fp8kv_jax.drift.result_range import Dimension
from fp8kv_jax.scales.fields import Checked, Count, Name, canonical_json, parse_json
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.scale_set import ScaleError

type Bound = tuple[str, Literal["max", "min"], float | None, float | None]
Action = Literal["note", "fail", "off"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds(Checked):
    """Bounds, None for no bound; each slice is held against all of them.

    Attributes:
      max_saturated_share: share of K and V values that saturate.
      max_saturated_tokens: the same of tokens, in the worst head.
      max_amax_ratio: live over calibrated amax, in the worst head.
      max_kl_mean, max_kl_p99: nats.
      min_top1_agreement: share of tokens.
      max_perplexity_ratio: FP8's over full precision's.
      max_attention_error: in the worst layer.
      min_exact_match: share of generated outputs that are equal.
      max_accuracy_drop: full precision's accuracy less FP8's.
    """

    max_saturated_share: float | None = 1e-6
    max_saturated_tokens: float | None = None
    max_amax_ratio: float | None = None
    max_kl_mean: float | None = 0.02
    max_kl_p99: float | None = None
    min_top1_agreement: float | None = 0.9
    max_perplexity_ratio: float | None = 1.02
    max_attention_error: float | None = None
    min_exact_match: float | None = None
    max_accuracy_drop: float | None = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Triggers(Checked):
    """What makes old evidence stale: "fail", "note" it in the verdict, or "off".

    Attributes:
      model: the weights or their configuration differ from the artifact's.
      tokenizer, template: the model's tokenizer or chat template does.
      context_length: a sequence is longer than any that was calibrated on.
      traffic_mix: half the sum of the differences of the classes' shares of tokens
        is above `max_mix_distance`.
    """

    model: Action = "note"
    tokenizer: Action = "note"
    template: Action = "note"
    context_length: Action = "note"
    traffic_mix: Action = "note"
    max_mix_distance: float = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy(Checked):
    """A policy file; every field has a default.

    Attributes:
      name, version: what evidence under this policy is known by.
      slices: the dimensions whose slices are held against the thresholds.
      min_slice_tokens: a smaller slice is skipped, and the verdict says so.
    """

    name: Name = "default"
    version: Name = "1"
    slices: tuple[Dimension, ...] = ("overall", "class", "language", "prompt_length")
    min_slice_tokens: Count = 256
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)
    triggers: Triggers = dataclasses.field(default_factory=Triggers)

    @property
    def sha256(self) -> str:
        spelled = canonical_json(dataclasses.asdict(self))
        return hashlib.sha256(spelled.encode()).hexdigest()


def read_policy(path: Path) -> Policy:
    """Reads a policy: TOML, or JSON if the name ends in .json.

    Raises:
      ScaleError: in one line that names the file and the field.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ScaleError(
            f"Expected a readable policy file, got {path}: {error.strerror}."
        ) from None
    if path.suffix.lower() == ".json":
        value = parse_json(data, str(path))
    else:
        try:
            value = tomllib.loads(data.decode())
        except ValueError as error:
            raise ScaleError(f"Expected {path} to be TOML, got: {error}.") from None
    try:
        return make_policy(value)
    except ScaleError as error:
        raise ScaleError(f"{path}: {error}") from None


def make_policy(value: Any) -> Policy:
    """Makes a policy of what a file holds; what it leaves out takes its default.

    Raises:
      ScaleError: naming the field.
    """
    value = _known(Policy, value, "policy")
    if "thresholds" in value:
        limits = _known(Thresholds, value["thresholds"], "thresholds")
        # TOML has no null.
        limits = {k: None if x == "off" else x for k, x in limits.items()}
        value["thresholds"] = Thresholds(**limits)
    if "triggers" in value:
        value["triggers"] = Triggers(**_known(Triggers, value["triggers"], "triggers"))
    policy = Policy(**value)
    if "overall" not in policy.slices:
        raise ScaleError('Expected policy.slices to name "overall".')
    return policy


def _known(kind: type, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ScaleError(f"Expected {where} to be a table of fields, got {value!r}.")
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ScaleError(
            f"Expected the fields {', '.join(names)} in {where}, got {unknown[0]!r}."
        )
    return dict(value)


def judge(
    policy: Policy,
    *,
    range_report: RangeReport,
    quality: QualityReport | None,
    generated: GeneratedReport | None,
    artifact: ArtifactRecord,
    model: ModelIdentity | None,
    workload: WorkloadRecord,
    settings: Settings,
) -> Verdict:
    """Holds a replay's figures against a policy."""
    checks = [
        *_check_slices(policy, range_report, quality),
        *_check_generated(policy, generated),
        *_check_triggers(policy, artifact, model, workload),
    ]
    failed = [check for check in checks if check.outcome == "failed"]
    verdict: Literal["passed", "failed"] = "failed" if failed else "passed"
    return Verdict(
        verdict=verdict,
        policy_name=policy.name,
        policy_version=policy.version,
        policy_sha256=policy.sha256,
        checks=tuple(checks),
        reasons=tuple(check.words for check in failed),
        envelope=_envelope(checks, artifact, workload, settings, quality is not None),
    )


def _check_slices(
    policy: Policy, range_report: RangeReport, quality: QualityReport | None
) -> Iterator[Check]:
    scored = {_key(x.slice): x for x in quality.slices} if quality else {}
    for ranges in range_report.slices:
        part = ranges.slice
        if part.dimension not in policy.slices or not part.num_tokens:
            continue
        name = slice_name(part)
        if part.num_tokens < policy.min_slice_tokens and part.dimension != "overall":
            words = (
                f"{name} has {part.num_tokens} tokens, fewer than "
                f"{policy.min_slice_tokens}: too few to judge."
            )
            yield Check(
                name="min_slice_tokens",
                slice=name,
                value=float(part.num_tokens),
                limit=float(policy.min_slice_tokens),
                outcome="skipped",
                words=words,
            )
            continue
        bounds = _range_bounds(policy.thresholds, ranges, range_report)
        if _key(part) in scored:
            bounds += _quality_bounds(policy.thresholds, scored[_key(part)])
        for bound in bounds:
            yield from _check(bound, name)


def _range_bounds(
    limits: Thresholds, ranges: RangeSlice, report: RangeReport
) -> list[Bound]:
    tokens = ranges.slice.num_tokens
    groups = 2 * len(report.layers) * report.num_kv_heads
    saturated = sum(sum(map(sum, t.saturated)) for t in (ranges.k, ranges.v))
    worst = max(max(map(max, t.saturated_tokens)) for t in (ranges.k, ranges.v))
    ratios = [
        ratio
        for table in (ranges.k, ranges.v)
        for row in table.ratio
        for ratio in row
        if ratio is not None
    ]
    share = saturated / (groups * report.head_dim * tokens)
    return [
        ("saturated_share", "max", share, limits.max_saturated_share),
        ("saturated_tokens", "max", worst / tokens, limits.max_saturated_tokens),
        ("amax_ratio", "max", max(ratios, default=None), limits.max_amax_ratio),
    ]


def _quality_bounds(limits: Thresholds, quality: QualitySlice) -> list[Bound]:
    full, fp8 = quality.perplexity_full, quality.perplexity_fp8
    ratio = fp8 / full if full and fp8 else None
    error = max(quality.attention_error)
    agreement = quality.top1_agreement
    return [
        ("kl_mean", "max", quality.kl_mean, limits.max_kl_mean),
        ("kl_p99", "max", quality.kl_p99, limits.max_kl_p99),
        ("top1_agreement", "min", agreement, limits.min_top1_agreement),
        ("perplexity_ratio", "max", ratio, limits.max_perplexity_ratio),
        ("attention_error", "max", error, limits.max_attention_error),
    ]


def _check_generated(
    policy: Policy, generated: GeneratedReport | None
) -> Iterator[Check]:
    if generated is None:
        return
    limits = policy.thresholds
    for part in generated.slices if "class" in policy.slices else generated.slices[:1]:
        name = "generated" if part.name == "all" else f"generated class={part.name}"
        full, fp8 = part.accuracy_full, part.accuracy_fp8
        drop = full - fp8 if full is not None and fp8 is not None else None
        bounds: list[Bound] = [
            ("exact_match", "min", part.exact_match, limits.min_exact_match),
            ("accuracy_drop", "max", drop, limits.max_accuracy_drop),
        ]
        for bound in bounds:
            yield from _check(bound, name)


def _check(bound: Bound, where: str) -> Iterator[Check]:
    name, side, value, limit = bound
    if limit is None or value is None:
        return
    good = value <= limit if side == "max" else value >= limit
    most = "at most" if side == "max" else "at least"
    # Digits enough to tell a value from the limit that it misses.
    digits = next((n for n in range(4, 9) if f"{value:.{n}g}" != f"{limit:.{n}g}"), 4)
    spelled = f"{value:.{digits}g} ({most} {limit:.{digits}g})"
    yield Check(
        name=f"{side}_{name}",
        slice=where,
        value=value,
        limit=limit,
        outcome="passed" if good else "failed",
        words=f"{where}: {name.replace('_', ' ')} {spelled}.",
    )


def _check_triggers(
    policy: Policy,
    artifact: ArtifactRecord,
    model: ModelIdentity | None,
    workload: WorkloadRecord,
) -> Iterator[Check]:
    triggers = policy.triggers
    differ = artifact.model.differences(model) if model is not None else {}
    fired = {
        "model": [x for x in differ if x not in ("tokenizer", "chat template")],
        "tokenizer": [x for x in differ if x == "tokenizer"],
        "template": [x for x in differ if x == "chat template"],
    }
    for name, parts in fired.items():
        if parts:
            words = f"the model's {', '.join(parts)} is not the artifact's"
            yield from _trigger(getattr(triggers, name), name, words)
    known = artifact.longest_context
    if known is not None and workload.longest > known:
        words = f"{workload.longest} tokens is beyond the calibrated {known}"
        action = triggers.context_length
        yield from _trigger(action, "context_length", words, workload.longest, known)
    distance = mix_distance(artifact, workload)
    if distance is not None and distance > triggers.max_mix_distance:
        words = f"the classes' shares differ by {distance:.2f} from those calibrated on"
        limit = triggers.max_mix_distance
        yield from _trigger(triggers.traffic_mix, "traffic_mix", words, distance, limit)


def _trigger(
    action: Action,
    name: str,
    words: str,
    value: float | None = None,
    limit: float | None = None,
) -> Iterator[Check]:
    if action == "off":
        return
    yield Check(
        name=f"trigger:{name}",
        slice="overall",
        value=None if value is None else float(value),
        limit=None if limit is None else float(limit),
        outcome="failed" if action == "fail" else "note",
        words=f"trigger {name}: {words}.",
    )


def mix_distance(artifact: ArtifactRecord, workload: WorkloadRecord) -> float | None:
    """Half the sum of the differences of the classes' shares of tokens, 0 to 1."""
    before = artifact.calibrated_classes
    if before is None:
        return None
    total = max(1, sum(x.num_tokens for x in workload.classes))
    now = {x.name: x.num_tokens / total for x in workload.classes}
    names = before.keys() | now.keys()
    return sum(abs(before.get(n, 0.0) - now.get(n, 0.0)) for n in names) / 2


def _envelope(
    checks: list[Check],
    artifact: ArtifactRecord,
    workload: WorkloadRecord,
    settings: Settings,
    scored: bool,
) -> str:
    """What passed, in words: a claim for classes, lengths and bounds."""
    failed = {check.slice for check in checks if check.outcome == "failed"}
    skipped = {check.slice for check in checks if check.outcome == "skipped"}
    good = [
        x.name
        for x in workload.classes
        if not {f"class={x.name}", f"generated class={x.name}"} & (failed | skipped)
    ]
    group = "KV head" if artifact.granularity == "head" else "layer"
    scales = f"one scale a {group}"
    if not failed:
        output = settings.max_new_tokens if settings.num_generated_prompts else 0
        reach = f"{workload.longest:,} tokens of input"
        reach += f" and {output:,} of output" if output else ""
        kind = "" if scored else " (range alone: no model ran)"
        bounds = sorted({(c.name, c.limit) for c in checks if c.outcome == "passed"})
        spelled = ", ".join(f"{name} {limit:.4g}" for name, limit in bounds)
        return (
            f"FP8 with {scales} passed {', '.join(good) or 'the workload as a whole'} "
            f"to {reach}{kind}, with the bounds {spelled}."
        )
    alone = f" On their own, these classes did: {', '.join(good)}." if good else ""
    return f"FP8 with {scales} did not pass this workload.{alone}"


def slice_name(part: Slice) -> str:
    """Spells a slice: "overall", or "class=chat"."""
    if part.dimension == "overall":
        return "overall"
    return f"{part.dimension}={part.name}"


def _key(part: Slice) -> tuple[str, str]:
    return part.dimension, part.name
