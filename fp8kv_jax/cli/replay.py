"""`fp8kv replay`: does a set of scales still fit, and what does it cost if not."""

import time
from pathlib import Path

import numpy as np
import typer

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.cli import options
from fp8kv_jax.cli import replay_options as flags
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.model import choose_dtype, load
from fp8kv_jax.cli.replay_report import show, write_page
from fp8kv_jax.cli.replay_run import Parts, Request, TextReplay, uncovered_layers
from fp8kv_jax.cli.replay_screen import ReplayScreen
from fp8kv_jax.drift.capacity import count_capacity
from fp8kv_jax.drift.policy import Policy, judge, read_policy
from fp8kv_jax.drift.range_trace import TraceReplay, scan_trace
from fp8kv_jax.drift.result import (
    ArtifactRecord,
    ReplayResult,
    Share,
    WorkloadRecord,
)
from fp8kv_jax.drift.result_evidence import make_evidence
from fp8kv_jax.drift.trace import open_trace
from fp8kv_jax.drift.workload import Tally
from fp8kv_jax.scales.artifact import add_evidence, check_against_model, read_artifact
from fp8kv_jax.scales.manifest import Manifest, library_versions, utc_now
from fp8kv_jax.scales.registry import find_artifact
from fp8kv_jax.scales.scale_set import ScaleSet

FAILED = 1


def replay(
    fp8_kv_scales: flags.Scales,
    workload: flags.Workload,
    policy: flags.PolicyFile = None,
    model: options.Model = None,
    dtype: options.Dtype = None,
    kv_high_precision_layers: options.HighPrecisionLayers = "none",
    allow_mismatch: options.AllowMismatch = None,
    max_prompt_tokens: flags.MaxPromptTokens = 2048,
    generate: flags.Generate = 8,
    max_new_tokens: options.MaxNewTokens = 64,
    attribute: flags.AttributeTo = flags.Attribute.LAYERS,
    attribution_samples: flags.AttributionSamples = 16,
    attribution_tokens: flags.AttributionTokens = 256,
    formats: flags.Formats = "fp8_head,fp8_token_head,int8_token_head,int4_token_head",
    tokens_per_step: flags.TokensPerStep = 512,
    top_k: flags.TopK = 10,
    small_margin: flags.SmallMargin = 0.1,
    seed: options.Seed = 0,
    page_size: options.PageSize = 128,
    report: flags.Report = None,
    attach_evidence: flags.AttachEvidence = False,
    as_json: options.Json = False,
) -> None:
    """Runs a workload in full precision and in FP8 with saved scales, and judges it.

    Exit code 0: the policy is met. 1: it is not. 2: an error.
    """
    flags.check_report(report)
    folder, scales, manifest = _read_scales(fp8_kv_scales)
    request = Request(
        workload=workload,
        policy=_read_policy(policy),
        scales=scales,
        manifest=manifest,
        model=model,
        dtype=dtype,
        high_precision_layers=options.parse_layers(kv_high_precision_layers),
        allow_mismatch=allow_mismatch,
        max_prompt_tokens=max_prompt_tokens,
        num_generated=generate,
        max_new_tokens=max_new_tokens,
        attribute=attribute,
        attribution_samples=attribution_samples,
        attribution_tokens=attribution_tokens,
        formats=flags.parse_formats(formats),
        tokens_per_step=tokens_per_step,
        top_k=top_k,
        small_margin=small_margin,
        seed=seed,
        page_size=page_size,
    )
    result = _replay(request)
    if attach_evidence:
        _attach(folder, result)
    if report is not None:
        write_page(result, report)
    show(result, as_json=as_json)
    if result.verdict.verdict != "passed":
        raise typer.Exit(FAILED)


def _read_scales(path: Path) -> tuple[Path, ScaleSet, Manifest]:
    with checking_input():
        try:
            folder = find_artifact(path)
            return folder, *read_artifact(folder)
        except OSError as error:
            raise UserError(f"Expected {path} to be readable: {error}.") from error


def _read_policy(path: Path | None) -> Policy:
    with checking_input():
        return Policy() if path is None else read_policy(path)


def _attach(folder: Path, result: ReplayResult) -> None:
    with checking_input():
        try:
            add_evidence(folder, make_evidence(result))
        except OSError as error:
            raise UserError(f"Expected to write {folder}: {error.strerror}.") from error


def _replay(request: Request) -> ReplayResult:
    is_trace = request.workload.suffix == ".safetensors"
    with ReplayScreen() as screen:
        return (_replay_trace if is_trace else _replay_text)(request, screen)


def _replay_trace(request: Request, screen: ReplayScreen) -> ReplayResult:
    """Looks at the range of recorded keys and values."""
    started = time.monotonic()
    with checking_input():
        trace = open_trace(request.workload)
        tally = scan_trace(trace)
        run = TraceReplay(trace, request.scales, tally)
    screen.watch("reading", run.run(), total=trace.num_tokens, unit="tokens")
    cache = CacheConfig(
        num_layers=trace.shape.num_layers,
        num_kv_heads=trace.shape.num_kv_heads,
        head_dim=trace.shape.head_dim,
        num_pages=1,
        page_size=request.page_size,
        high_precision_layers=uncovered_layers(request.scales, trace.shape.num_layers),
    )
    settings = request.settings(options.ComputeDtype.FLOAT32, tally.percentile(1))
    parts = Parts(
        range_report=run.ranges.report(fp8_run_saturated=None),
        tally=tally,
        cache=cache,
        settings=settings,
        model_name=request.workload.name,
    )
    return _assemble(request, parts, kind="trace", started=started)


def _replay_text(request: Request, screen: ReplayScreen) -> ReplayResult:
    """Runs prompts and chats through the model, both ways."""
    started = time.monotonic()
    dtype = choose_dtype(request.dtype)
    screen.phase("loading the model")
    model = load(request.model, dtype)
    screen.phase("hashing the model")
    identity = identify(model)
    with checking_input():
        allowed = check_against_model(
            request.scales,
            request.manifest,
            identity,
            allow_mismatch=request.allow_mismatch,
        )
    run = TextReplay(request, model, dtype)
    screen.phase("reading the workload")
    run.scan()
    run.generate(screen)
    run.score(screen)
    run.attribute(screen)
    parts = run.parts(identity, tuple(allowed))
    return _assemble(request, parts, kind="text", started=started)


def _assemble(
    request: Request, parts: Parts, *, kind: str, started: float
) -> ReplayResult:
    artifact = _artifact_record(request, parts.allowed)
    workload = _workload_record(request.workload.name, parts.tally, kind)
    verdict = judge(
        request.policy,
        range_report=parts.range_report,
        quality=parts.quality,
        generated=parts.generated,
        artifact=artifact,
        model=parts.identity,
        workload=workload,
        settings=parts.settings,
    )
    groups = request.scales.groups
    attributor = parts.attributor
    return ReplayResult(
        created_at=utc_now(),
        library_versions=library_versions(),
        model_name=parts.model_name,
        model=parts.identity,
        artifact=artifact,
        workload=workload,
        settings=parts.settings,
        range=parts.range_report,
        quality=parts.quality,
        generated=parts.generated,
        drifts=attributor.drifts if attributor else None,
        attribution=attributor.attribution if attributor else None,
        formats=parts.formats,
        capacity=count_capacity(parts.cache, parts.tally.lengths, groups=groups),
        verdict=verdict,
        seconds=time.monotonic() - started,
    )


def _artifact_record(request: Request, allowed: tuple[str, ...]) -> ArtifactRecord:
    manifest = request.manifest
    classes = manifest.data.classes
    shares = None
    if classes:
        total = max(1, sum(count.tokens for count in classes.values()))
        shares = {name: count.tokens / total for name, count in classes.items()}
    return ArtifactRecord(
        artifact_id=manifest.artifact_id,
        scales_sha256=str(manifest.scales_sha256),
        granularity=manifest.recipe.granularity,
        headroom=manifest.recipe.headroom,
        model=manifest.model,
        calibrated_classes=shares,
        longest_context=manifest.envelope.longest_context,
        allowed_mismatches=allowed,
    )


def _workload_record(name: str, tally: Tally, kind: str) -> WorkloadRecord:
    def shares(counts: dict[str, list[int]]) -> tuple[Share, ...]:
        return tuple(
            Share(name=key, num_samples=samples, num_tokens=tokens)
            for key, (samples, tokens) in counts.items()
        )

    return WorkloadRecord(
        name=name,
        kind="text" if kind == "text" else "trace",
        sha256=tally.sha256,
        num_samples=tally.num_samples,
        num_tokens=tally.num_tokens,
        num_cut=tally.num_cut,
        classes=shares(tally.classes),
        languages=shares(tally.languages),
        short=tally.percentile(0.25),
        median=tally.percentile(0.5),
        p95=tally.percentile(0.95),
        longest=int(np.flatnonzero(tally.lengths)[-1]),
        num_with_answer=tally.num_with_answer,
    )
