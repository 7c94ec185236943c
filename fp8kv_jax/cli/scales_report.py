"""Scales, registries and differences of scales, as JSON and as tables."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from fp8kv_jax.scales.diff import LayerDiff, farthest, moved
from fp8kv_jax.scales.manifest import Manifest, Percentiles
from fp8kv_jax.scales.registry import Entry
from fp8kv_jax.scales.scale_set import ScaleSet, short_list

_BY_GROUP = ("k_scale", "v_scale", "k_amax", "v_amax")
# Cells of a bar on each side of 1, and the ratio that fills one: 1/4 or 4.
_BAR, _BAR_RATIO = 12, 4.0


def artifact_json(scale_set: ScaleSet, manifest: Manifest) -> dict[str, Any]:
    """The manifest, and the values of each layer; an unknown amax is null."""
    layers = []
    for row, layer in enumerate(scale_set.layers):
        values: dict[str, Any] = {"layer": layer}
        for name in _BY_GROUP:
            groups = getattr(scale_set, name)[row].tolist()
            groups = [None if math.isnan(x) else x for x in groups]
            values[name] = groups if scale_set.granularity == "head" else groups[0]
        layers.append(values)
    return json.loads(manifest.to_json()) | {"layers": layers}


def describe(manifest: Manifest) -> list[str]:
    """An artifact in a few lines."""
    model, recipe, envelope = manifest.model, manifest.recipe, manifest.envelope
    headroom = "unknown" if recipe.headroom is None else f"{recipe.headroom:g}"
    silent = [f"{x.layer}.{x.tensor}[{x.group}]" for x in manifest.no_signal]
    versions = " ".join(f"{k} {v}" for k, v in manifest.library_versions.items())
    lines = [
        f"artifact {manifest.artifact_id}, made {manifest.created_at}"
        + (f" from {manifest.parent}" if manifest.parent else ""),
        f"model: {model.architecture}, {model.num_layers} layers of "
        f"{model.num_kv_heads} KV heads of {model.head_dim}; weights "
        f"{model.weights_sha256[:12]}, config {model.config_sha256[:12]}, tokenizer "
        f"{_hash(model.tokenizer_sha256)}, chat template "
        f"{_hash(model.chat_template_sha256)}",
        f"data: {_data(manifest)}",
        f"recipe: {recipe.granularity}, rule {recipe.rule}, headroom {headroom}, "
        f"{recipe.fp8_format}",
        f"envelope: longest context {_known(envelope.longest_context)}, prompts "
        f"{_lengths(envelope.prompt_lengths)}, outputs "
        f"{_lengths(envelope.output_lengths)}, languages "
        f"{', '.join(envelope.languages or ['unknown'])}",
        f"skipped layers: {short_list(manifest.skipped_layers) or 'none'}; no_signal "
        f"groups: {', '.join(silent) or 'none'}",
    ]
    lines += [
        f"evidence: {x.kind} of {x.created_at}: {x.verdict}" for x in manifest.evidence
    ] or ["evidence: none"]
    return [*lines, f"versions: {versions or 'unknown'}"]


def _data(manifest: Manifest) -> str:
    data = manifest.data
    line = f"{data.source}, {_known(data.tokens_seen)} tokens"
    if data.files:
        line += f" of {len(data.files)} " + (
            "file" if len(data.files) == 1 else "files"
        )
    if data.classes is None:
        return f"{line}, classes unknown"
    counts = (f"{name} {x.tokens:,}" for name, x in data.classes.items())
    return f"{line} ({', '.join(counts)})"


def _lengths(x: Percentiles | None) -> str:
    if x is None:
        return "unknown"
    return f"p50 {x.p50:,} p90 {x.p90:,} p99 {x.p99:,} max {x.max:,}"


def _hash(value: str | None) -> str:
    return value[:12] if value else "none"


def _known(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def scales_table(scale_set: ScaleSet) -> Table:
    """Every layer, each of its groups on a line."""
    table = _table("layer", *_BY_GROUP)
    for row, layer in enumerate(scale_set.layers):
        cells = (getattr(scale_set, name)[row] for name in _BY_GROUP)
        table.add_row(str(layer), *("\n".join(map(_number, x)) for x in cells))
    return table


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.4g}"


def registry_json(entries: Sequence[Entry]) -> dict[str, Any]:
    """What is live, and every artifact with its manifest or its problem."""
    return {
        "live": next((x.artifact_id for x in entries if x.live), None),
        "artifacts": [
            {
                "artifact_id": x.artifact_id,
                "live": x.live,
                "previous": x.previous,
                "problem": x.problem,
                "manifest": json.loads(x.manifest.to_json()) if x.manifest else None,
            }
            for x in entries
        ],
    }


def registry_table(entries: Sequence[Entry]) -> Table:
    """One artifact a line, newest first."""
    table = Table("", "artifact", "made", "model", "scales", "data", box=box.SIMPLE)
    for column in table.columns[:3]:
        column.no_wrap = True
    for x in entries:
        mark = "live" if x.live else "previous" if x.previous else ""
        if x.manifest is None:
            table.add_row(mark, x.artifact_id, "", Text("cannot be read", style="red"))
            continue
        model, recipe = x.manifest.model, x.manifest.recipe
        table.add_row(
            mark,
            x.artifact_id,
            x.manifest.created_at[:16].replace("T", " "),
            f"{model.architecture} {model.weights_sha256[:8]}",
            recipe.granularity,
            _data(x.manifest),
        )
    return table


def diff_json(diffs: Sequence[LayerDiff], threshold: float) -> dict[str, Any]:
    """Ratios B / A by layer and group; null where one set alone covers a layer."""
    return {
        "threshold": threshold,
        "moved": [x.layer for x in diffs if moved(x, threshold)],
        "layers": [
            {
                "layer": x.layer,
                "only_in": x.only_in,
                "k_ratio": _tolist(x.k_ratio),
                "v_ratio": _tolist(x.v_ratio),
            }
            for x in diffs
        ],
    }


def _tolist(ratios: np.ndarray | None) -> list[float] | None:
    return None if ratios is None else ratios.tolist()


def diff_line(diffs: Sequence[LayerDiff], threshold: float) -> str:
    layers = [x.layer for x in diffs if moved(x, threshold)]
    line = (
        f"{len(layers)} of {len(diffs)} layers moved by more than {100 * threshold:g} %"
    )
    return f"{line}: {short_list(layers)}" if layers else line


def diff_table(diffs: Sequence[LayerDiff], threshold: float) -> Table:
    """A line for each layer: ratio of K and of V (of heads the farthest), with bars."""
    table = _table("layer", "k B/A", "", "v B/A", "", "")
    for column in (2, 4, 5):
        table.columns[column].justify = "left"
    for x in diffs:
        if x.k_ratio is None or x.v_ratio is None:
            table.add_row(str(x.layer), *[""] * 4, f"only in {str(x.only_in).upper()}")
            continue
        k, v = farthest(x.k_ratio), farthest(x.v_ratio)
        mark = "moved" if moved(x, threshold) else ""
        cells = (f"{k:.4f}", _bar(k), f"{v:.4f}", _bar(v), mark)
        table.add_row(str(x.layer), *cells)
    return table


def _bar(ratio: float) -> str:
    """Draws a ratio to the left of 1 or to the right; a long one ends in a mark."""
    cells = round(_BAR * math.log(ratio) / math.log(_BAR_RATIO))
    size = min(abs(cells), _BAR)
    bar = "\u2588" * size
    if abs(cells) > _BAR:
        bar = f"<{bar[1:]}" if cells < 0 else f"{bar[1:]}>"
    left, right = (bar, "") if cells < 0 else ("", bar)
    return f"{left:>{_BAR}}\u2502{right:<{_BAR}}"


def _table(*titles: str) -> Table:
    table = Table(*titles, box=box.SIMPLE, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
