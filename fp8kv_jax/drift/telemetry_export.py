"""Telemetry as text for other programs: Prometheus exposition and JSON lines."""

import json
from collections.abc import Iterator

import numpy as np

from fp8kv_jax.drift.telemetry import Readings, TelemetrySummary, bin_edges

JSON_LINES_VERSION = 1

# Name of the metric, the field it shows, its type, and what it means.
_METRICS = (
    (
        "fp8kv_kv_amax",
        "amax",
        "gauge",
        "Largest finite absolute value, in units of the activations.",
    ),
    (
        "fp8kv_kv_saturated_values_total",
        "saturated",
        "counter",
        "Finite values clipped beyond rounding: above 464 times the scale.",
    ),
    (
        "fp8kv_kv_saturated_tokens_total",
        "saturated_tokens",
        "counter",
        "Tokens with a saturated value in this head.",
    ),
    (
        "fp8kv_kv_underflowed_values_total",
        "underflowed",
        "counter",
        "Nonzero values stored as zero: at most 2^-10 times the scale.",
    ),
    (
        "fp8kv_kv_nonfinite_values_total",
        "nonfinite",
        "counter",
        "Values that are NaN or infinite.",
    ),
)


def prometheus_text(summary: TelemetrySummary) -> str:
    """Writes telemetry in Prometheus' text exposition format, version 0.0.4.

    Series carry the labels `layer`, `head` and `tensor` ("k" or "v").
    `fp8kv_kv_range_values_total` is the histogram, cumulative over its label `le`, in
    parts of the range `448 * scale`: `histogram_quantile` takes it as it is. It is a
    counter and not of type histogram, because the sum of the values is not counted.
    """
    lines = [
        *_head("fp8kv_kv_tokens_total", "counter", "Tokens counted in this layer."),
        *(
            f'fp8kv_kv_tokens_total{{layer="{layer}"}} {tokens}'
            for layer, tokens in zip(summary.layers, summary.tokens, strict=True)
        ),
    ]
    for name, field, kind, meaning in _METRICS:
        lines += _head(name, kind, meaning)
        for labels, readings, at in _series(summary):
            value = getattr(readings, field)[at]
            lines.append(f"{name}{{{labels}}} {_number(value)}")
    name = "fp8kv_kv_range_values_total"
    meaning = "Finite values up to le of the range, 448 times the scale; cumulative."
    lines += _head(name, "counter", meaning)
    for labels, readings, at in _series(summary):
        below = np.cumsum(readings.histogram[at])
        for edge, count in zip(bin_edges(), below, strict=True):
            lines.append(f'{name}{{{labels},le="{_number(edge)}"}} {count}')
    return "\n".join(lines) + "\n"


def json_lines(summary: TelemetrySummary) -> str:
    """Writes telemetry as JSON lines: a header, then one for each layer, head, tensor.

    The header holds the histogram's upper edges in parts of the range `448 * scale`,
    null for the last, which has none.
    """
    edges = [float(edge) for edge in bin_edges()[:-1]]
    records: list[dict] = [
        {
            "version": JSON_LINES_VERSION,
            "head_dim": summary.head_dim,
            "bin_edges": [*edges, None],
        }
    ]
    for tensor, row, head in _cells(summary):
        readings: Readings = getattr(summary, tensor)
        at = row, head
        records.append(
            {
                "layer": summary.layers[row],
                "head": head,
                "tensor": tensor,
                "tokens": int(summary.tokens[row]),
                "values": int(summary.values[row]),
                "amax": float(readings.amax[at]),
                "saturated": int(readings.saturated[at]),
                "saturated_tokens": int(readings.saturated_tokens[at]),
                "underflowed": int(readings.underflowed[at]),
                "nonfinite": int(readings.nonfinite[at]),
                "histogram": readings.histogram[at].tolist(),
            }
        )
    return "".join(json.dumps(record) + "\n" for record in records)


def _cells(summary: TelemetrySummary) -> Iterator[tuple[str, int, int]]:
    """Every (tensor, row, head) in the order of the output."""
    num_rows, num_heads = summary.k.amax.shape
    for row in range(num_rows):
        for head in range(num_heads):
            yield "k", row, head
            yield "v", row, head


def _series(
    summary: TelemetrySummary,
) -> Iterator[tuple[str, Readings, tuple[int, int]]]:
    for tensor, row, head in _cells(summary):
        layer = summary.layers[row]
        labels = f'layer="{layer}",head="{head}",tensor="{tensor}"'
        yield labels, getattr(summary, tensor), (row, head)


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _number(value: np.integer | np.floating) -> str:
    if isinstance(value, np.integer):
        return str(int(value))
    return "+Inf" if np.isposinf(value) else repr(float(value))
