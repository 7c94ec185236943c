"""A replay's result with something in every field."""

import hashlib

from fp8kv_jax.drift.result import (
    ArtifactRecord,
    Attribution,
    CacheBytes,
    Capacity,
    Check,
    Flag,
    FormatReport,
    FormatTrial,
    GeneratedExample,
    GeneratedReport,
    GeneratedSlice,
    HighPrecisionTrial,
    LayerLoss,
    Misranking,
    PositionCurve,
    QualityReport,
    QualitySlice,
    RangeReport,
    RangeSlice,
    RangeTable,
    ReplayResult,
    ScaleTrial,
    Settings,
    Share,
    Slice,
    TwoDrifts,
    Verdict,
    WorkloadRecord,
    WorstToken,
)
from fp8kv_jax.scales.identity import ModelIdentity

LAYERS, HEADS, HEAD_DIM, TOKENS = 3, 2, 8, 1000
EDGES = (-18.8, -18.0, 0.0, 3.0)


def identity(**changes) -> ModelIdentity:
    fields = {
        "architecture": "llama",
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "config_sha256": "c" * 64,
        "weights_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "chat_template_sha256": None,
    }
    return ModelIdentity(**(fields | changes))


def grid(value):
    return [[value] * HEADS] * LAYERS


def range_table(saturated=0, **changes) -> RangeTable:
    fields = {
        "live_amax": grid(3.0),
        "ratio": grid(0.9),
        "saturated": grid(saturated),
        "saturated_tokens": grid(min(saturated, TOKENS)),
        "underflowed": grid(5),
        "nonfinite": grid(0),
        "histogram": grid([5, 10, TOKENS * HEAD_DIM - 15, 0, 0]),
    }
    return RangeTable(**(fields | changes))


PARTS = (
    Slice(dimension="overall", name="all", num_tokens=TOKENS),
    Slice(dimension="class", name="chat", num_tokens=700),
    Slice(dimension="class", name="code", num_tokens=300),
    Slice(dimension="language", name="en", num_tokens=TOKENS),
    Slice(dimension="prompt_length", name="1-40", num_tokens=100),
)


def range_report(saturated=0, **changes) -> RangeReport:
    table = range_table(saturated)
    fields = {
        "layers": range(LAYERS),
        "num_kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "k_scale": grid(0.01),
        "v_scale": grid(0.02),
        "k_calibrated_amax": grid(3.3),
        "v_calibrated_amax": grid(None),
        "histogram_edges": EDGES,
        "slices": [RangeSlice(slice=x, k=table, v=table) for x in PARTS],
        "flags": [
            Flag(
                kind="drifted",
                tensor="v",
                layer=1,
                head=0,
                value=1.7,
                limit=1.5,
                words="V of layer 1, head 0: the live maximum is 1.7 times ...",
            )
        ],
        "fp8_run_saturated": saturated,
    }
    fields["layers"] = tuple(fields["layers"])
    return RangeReport(**(fields | changes))


def quality_slice(part, kl=0.004, **changes) -> QualitySlice:
    fields = {
        "slice": part,
        "kl_mean": kl,
        "kl_p50": kl / 2,
        "kl_p99": kl * 9,
        "kl_max": kl * 30,
        "top1_agreement": 0.97,
        "perplexity_full": 10.0,
        "perplexity_fp8": 10.1,
        "misranking": Misranking(
            num_pairs=9 * part.num_tokens, flips=0.1, weighted=0.02, close_flips=0.9
        ),
        "attention_error": (0.02, 0.05, 0.06),
    }
    return QualitySlice(**(fields | changes))


def quality_report(**changes) -> QualityReport:
    curve = PositionCurve(
        axis="context",
        edges=(0, 16, 64),
        num_tokens=(600, 400),
        kl_mean=(0.005, None),
        top1_agreement=(0.96, None),
        slope=-0.1,
        slope_error=0.2,
        accumulates=False,
    )
    worst = WorstToken(
        sample="line 3",
        data_class="chat",
        language="en",
        position=17,
        kl=0.4,
        context="the <b>capital</b> of",
        next_token=" France",
        full_top=" France",
        full_probability=0.6,
        fp8_top=" Spain",
        fp8_probability=0.4,
    )
    fields = {
        "slices": [quality_slice(x) for x in PARTS],
        "attention_error": grid(0.04),
        "curves": (curve,),
        "worst_tokens": (worst,),
    }
    return QualityReport(**(fields | changes))


def generated_report(full=0.75, fp8=0.75, exact=0.5) -> GeneratedReport:
    part = {
        "num_prompts": 8,
        "exact_match": exact,
        "first_divergence_p50": 12,
        "first_divergence_min": 3,
        "agreement": 0.8,
        "num_with_answer": 4,
        "accuracy_full": full,
        "accuracy_fp8": fp8,
    }
    example = GeneratedExample(
        sample="line 9",
        data_class="chat",
        prompt="2 + 3?",
        full_text="5",
        fp8_text="five",
        num_tokens=3,
        first_divergence=1,
        expected=("5", "five"),
        full_correct=True,
        fp8_correct=True,
    )
    slices = [GeneratedSlice(name=name, **part) for name in ("all", "chat")]
    return GeneratedReport(slices=tuple(slices), examples=(example,))


def artifact(**changes) -> ArtifactRecord:
    fields = {
        "artifact_id": "0123456789abcdef",
        "scales_sha256": "e" * 64,
        "granularity": "head",
        "headroom": 2.0,
        "model": identity(),
        "calibrated_classes": {"chat": 0.7, "code": 0.3},
        "longest_context": 64,
        "allowed_mismatches": (),
    }
    return ArtifactRecord(**(fields | changes))


def workload(**changes) -> WorkloadRecord:
    fields = {
        "name": "w.jsonl",
        "kind": "text",
        "sha256": hashlib.sha256(b"w").hexdigest(),
        "num_samples": 20,
        "num_tokens": TOKENS,
        "num_cut": 1,
        "classes": [
            Share(name="chat", num_samples=14, num_tokens=700),
            Share(name="code", num_samples=6, num_tokens=300),
        ],
        "languages": [Share(name="en", num_samples=20, num_tokens=TOKENS)],
        "short": 16,
        "median": 40,
        "p95": 60,
        "longest": 64,
        "num_with_answer": 4,
    }
    return WorkloadRecord(**(fields | changes))


def settings(**changes) -> Settings:
    fields = {
        "dtype": "float32",
        "platform": "cpu",
        "page_size": 128,
        "tokens_per_step": 512,
        "high_precision_layers": (),
        "top_k": 10,
        "small_margin": 0.1,
        "max_prompt_tokens": 2048,
        "num_generated_prompts": 8,
        "max_new_tokens": 16,
        "attribution_samples": 16,
        "attribution_tokens": 256,
        "seed": 0,
    }
    return Settings(**(fields | changes))


def attribution() -> Attribution:
    scales = [
        ScaleTrial(
            name=name,
            kl_mean=0.01,
            top1_agreement=0.96,
            local_attention_error=(0.02,) * LAYERS,
            saturated_share=0.0,
            scale_bytes=96,
        )
        for name in ("saved", "live_head", "live_tensor")
    ]
    layers = [
        LayerLoss(
            layer=i,
            kl_mean=0.002 * (i + 1),
            share=(i + 1) / 6,
            top1_agreement=0.98,
            head_kl=(0.001, 0.002) if i == 2 else None,
        )
        for i in range(LAYERS)
    ]
    trial = HighPrecisionTrial(
        layers=(2,),
        kl_mean=0.006,
        top1_agreement=0.97,
        bytes_per_token=128,
        extra_bytes_per_token=32,
    )
    return Attribution(
        num_samples=16,
        num_tokens=4096,
        kl_mean=0.012,
        top1_agreement=0.95,
        layers=tuple(layers),
        trials=(trial,),
        recommended=(2,),
        recommendation="--kv-high-precision-layers 2: ...",
        scales=tuple(scales),
    )


def formats() -> FormatReport:
    trials = [
        FormatTrial(
            name=name,
            kl_mean=kl,
            top1_agreement=0.95,
            local_attention_error=(0.02,) * LAYERS,
            code_bytes_per_token=96,
            metadata_bytes_per_token=metadata,
            fixed_metadata_bytes=fixed,
        )
        for name, kl, metadata, fixed in (
            ("fp8_head", 0.012, 0, 96),
            ("int8_token_head", 0.001, 48, 0),
        )
    ]
    return FormatReport(
        num_samples=16,
        num_tokens=4096,
        layers=tuple(range(LAYERS)),
        trials=tuple(trials),
    )


def capacity() -> Capacity:
    fields = {
        "page_end_waste": 40,
        "scales": 96,
        "block_tables": 80,
        "longest_sequence": 9000,
    }
    return Capacity(
        page_size=128,
        num_sequences=20,
        num_tokens=TOKENS,
        num_pages=20,
        fp8=CacheBytes(pages=10_000, bytes_per_token=96, **fields),
        bf16=CacheBytes(pages=20_000, bytes_per_token=192, **(fields | {"scales": 0})),
        saved_share=0.49,
    )


def verdict(word="passed") -> Verdict:
    check = Check(
        name="max_kl_mean",
        slice="overall",
        value=0.004,
        limit=0.02,
        outcome=word,
        words="overall: kl mean 0.004 (at most 0.02).",
    )
    return Verdict(
        verdict=word,
        policy_name="default",
        policy_version="1",
        policy_sha256="d" * 64,
        checks=(check,),
        reasons=() if word == "passed" else (check.words,),
        envelope="FP8 with one scale a KV head passed chat, code to 64 tokens ...",
    )


def result(**changes) -> ReplayResult:
    fields = {
        "created_at": "2026-01-31T12:00:00Z",
        "library_versions": {"jax": "0.12.0.1"},
        "model_name": "tiny",
        "model": identity(),
        "artifact": artifact(),
        "workload": workload(),
        "settings": settings(),
        "range": range_report(),
        "quality": quality_report(),
        "generated": generated_report(),
        "drifts": TwoDrifts(
            saturated_share=0.0,
            kl_saved=0.012,
            kl_fitted=0.011,
            kl_from_scales=0.001,
            words="No value leaves the saved range.",
        ),
        "attribution": attribution(),
        "formats": formats(),
        "capacity": capacity(),
        "verdict": verdict(),
        "seconds": 12.5,
    }
    return ReplayResult(**(fields | changes))
