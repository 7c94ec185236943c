"""A replay as evidence of an artifact, and what evidence lets a new checkpoint take over."""

import dataclasses
from typing import Any

from fp8kv_jax.drift.result import ReplayResult
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.manifest import Evidence, Manifest, utc_now
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

KIND = "drift_replay"


def make_evidence(result: ReplayResult) -> Evidence:
    """Sums a replay up for an artifact's manifest: identities, figures, verdict."""
    verdict = result.verdict
    return Evidence(
        kind=KIND,
        created_at=result.created_at,
        verdict=verdict.verdict,
        summary={
            "schema_version": result.schema_version,
            "model": None if result.model is None else dataclasses.asdict(result.model),
            "scales_sha256": result.artifact.scales_sha256,
            "policy": {
                "name": verdict.policy_name,
                "version": verdict.policy_version,
                "sha256": verdict.policy_sha256,
            },
            "workload": {
                "name": result.workload.name,
                "sha256": result.workload.sha256,
                "num_tokens": result.workload.num_tokens,
                "longest": result.workload.longest,
                "classes": [x.name for x in result.workload.classes],
                "languages": [x.name for x in result.workload.languages],
            },
            "high_precision_layers": list(result.settings.high_precision_layers),
            "figures": _figures(result),
            "reasons": list(verdict.reasons),
            "envelope": verdict.envelope,
        },
    )


def _figures(result: ReplayResult) -> dict[str, Any]:
    overall = result.range.overall
    figures: dict[str, Any] = {
        "saturated": sum(sum(map(sum, t.saturated)) for t in (overall.k, overall.v)),
        "flags": [flag.words for flag in result.range.flags[:20]],
    }
    if result.quality is not None:
        quality = result.quality.overall
        figures |= {
            "kl_mean": quality.kl_mean,
            "top1_agreement": quality.top1_agreement,
            "perplexity_full": quality.perplexity_full,
            "perplexity_fp8": quality.perplexity_fp8,
        }
    if result.generated is not None:
        generated = result.generated.overall
        figures |= {
            "exact_match": generated.exact_match,
            "accuracy_full": generated.accuracy_full,
            "accuracy_fp8": generated.accuracy_fp8,
        }
    return figures


def find_proof(manifest: Manifest, model: ModelIdentity) -> Evidence:
    """Finds the replay that proves these very scales on a model.

    The newest replay of exactly this model and these scales decides: one that failed
    after another had passed is the last word.

    Raises:
      ScaleError: if there is none, or it failed.
    """
    wanted = dataclasses.asdict(model)
    found = [
        evidence
        for evidence in manifest.evidence
        if evidence.kind == KIND
        and evidence.summary.get("model") == wanted
        and evidence.summary.get("scales_sha256") == manifest.scales_sha256
    ]
    if not found:
        raise ScaleError(
            "Expected evidence that these scales fit this model, found no replay of "
            "exactly this model and these scales: run `fp8kv replay` on it with "
            "--allow-mismatch and --attach-evidence."
        )
    proof = found[-1]
    if proof.verdict != "passed":
        raise ScaleError(
            "Expected the last replay on this model to have passed, but that of "
            f"{proof.created_at} has the verdict {proof.verdict!r}."
        )
    if proof.summary.get("high_precision_layers"):
        layers = ", ".join(map(str, proof.summary["high_precision_layers"]))
        raise ScaleError(
            "Expected a replay of all the scales, but that of "
            f"{proof.created_at} kept layers {layers} in high precision."
        )
    return proof


def rebind(scale_set: ScaleSet, manifest: Manifest, model: ModelIdentity) -> Manifest:
    """Binds an artifact's scales to another model that a replay has proven them on.

    Returns:
      A manifest for `write_artifact`: the scales and what they rest on stay, the model
      is the new one, the artifact they came from is the parent, and the proof is the
      evidence. Checks of the old model are left behind with it.

    Raises:
      ScaleError: if there is no proof, or the artifact is that model's already.
    """
    if not manifest.model.differences(model):
        raise ScaleError(
            "Expected another model than the artifact's own: it is bound to this one."
        )
    scale_set.check(num_layers=model.num_layers, num_kv_heads=model.num_kv_heads)
    proof = find_proof(manifest, model)
    return dataclasses.replace(
        manifest,
        model=model,
        parent=manifest.artifact_id,
        evidence=(proof,),
        created_at=utc_now(),
        scales_sha256=None,
    )
