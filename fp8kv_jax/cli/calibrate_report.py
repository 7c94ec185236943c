"""What `fp8kv calibrate` says when it is done."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8kv_jax.cli.errors import print_warning
from fp8kv_jax.scales.artifact import SCALES_NAME
from fp8kv_jax.scales.manifest import Manifest
from fp8kv_jax.scales.sample_plan import SamplePlan
from fp8kv_jax.scales.scale_set import ScaleSet
from fp8kv_jax.scales.statistics import AmaxState


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a finished run shows."""

    plan: SamplePlan
    state: AmaxState
    scales: ScaleSet
    manifest: Manifest
    resumed_samples: int
    observe_s: float
    total_s: float

    @property
    def num_nonfinite(self) -> int:
        return int(self.state.k_nonfinite.sum() + self.state.v_nonfinite.sum())

    @property
    def no_signal(self) -> list[str]:
        per_head = self.scales.granularity == "head"
        return [
            f"{x.layer}.{x.tensor}" + (f"[{x.group}]" if per_head else "")
            for x in self.manifest.no_signal
        ]


def report(out: Path, done: Done, *, as_json: bool) -> None:
    if done.no_signal:
        print_warning(
            f"groups {', '.join(done.no_signal)} saw only zeros: their scale, 2.0, "
            "rests on nothing, and the manifest lists them under no_signal."
        )
    if done.num_nonfinite:
        print_warning(
            f"{done.num_nonfinite:,} values of K and V were not finite and ignored."
        )
    if as_json:
        print(json.dumps(_as_json(out, done), allow_nan=False))
        return
    console = Console(stderr=True, highlight=False)
    console.print(_classes_table(done))
    console.print(_scales_table(done))
    tokens = int(done.state.num_tokens.sum())
    line = (
        f"{len(done.plan.samples)} samples, {tokens:,} tokens in {done.observe_s:.1f} s"
        f"; wrote {out} (artifact {done.manifest.artifact_id})"
    )
    console.print(line, soft_wrap=True, markup=False)


def _as_json(out: Path, done: Done) -> dict[str, Any]:
    state, plan = done.state, done.plan
    classes = zip(plan.classes, state.num_samples, state.num_tokens, strict=True)
    return {
        "artifact": {
            "path": str(out),
            "id": done.manifest.artifact_id,
            "scales_file": SCALES_NAME,
            "scales_sha256": done.manifest.scales_sha256,
        },
        "data": {
            "num_samples": len(plan.samples),
            "num_samples_asked": plan.num_samples_asked,
            "num_tokens": int(state.num_tokens.sum()),
            "passages": sum(r.num_passages for r in plan.records),
            "empty_skipped": sum(r.num_empty for r in plan.records),
            "duplicates_skipped": plan.num_duplicates,
            "binary_files_skipped": sum(r.num_binary for r in plan.records),
            "classes": {
                name: {"samples": int(samples), "tokens": int(tokens)}
                for name, samples, tokens in classes
            },
        },
        "layers": list(done.scales.layers),
        "skipped_layers": list(done.manifest.skipped_layers),
        "no_signal": done.no_signal,
        "nonfinite": done.num_nonfinite,
        "resumed_samples": done.resumed_samples,
        "timing": {"observe_s": done.observe_s, "total_s": done.total_s},
    }


def _classes_table(done: Done) -> Table:
    table = Table("data class", "samples", "tokens", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    state = done.state
    for name, samples, tokens in zip(
        done.plan.classes, state.num_samples, state.num_tokens, strict=True
    ):
        table.add_row(Text(name), f"{samples:,}", f"{tokens:,}")
    return table


def _scales_table(done: Done) -> Table:
    table = Table("", "min", "median", "max", "largest in layer", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("k_amax", "v_amax", "k_scale", "v_scale"):
        values = getattr(done.scales, name)
        spread = (values.min(), np.median(values), values.max())
        layer = done.scales.layers[int(values.max(axis=1).argmax())]
        table.add_row(name, *(f"{x:.4g}" for x in spread), str(layer))
    return table
