"""Telemetry as Prometheus text and as JSON lines says what was counted."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from fp8kv_jax.drift.telemetry import (
    NUM_BINS,
    Readings,
    TelemetrySummary,
    bin_edges,
)
from fp8kv_jax.drift.telemetry_export import json_lines, prometheus_text

LAYERS, NUM_HEADS, HEAD_DIM = (1, 3), 2, 4


def readings(start):
    """Distinct numbers everywhere, some of them past 2^53."""
    shape = len(LAYERS), NUM_HEADS

    def count(offset):
        return np.arange(4).reshape(shape) + start + offset + 2**60

    return Readings(
        amax=np.array([[0, 0.1], [448, 1e-7]], np.float32) + np.float32(start),
        saturated=count(10),
        saturated_tokens=count(20),
        underflowed=count(30),
        nonfinite=count(40),
        histogram=np.arange(4 * NUM_BINS).reshape(*shape, NUM_BINS) + start,
    )


@pytest.fixture
def summary():
    return TelemetrySummary(
        layers=LAYERS,
        head_dim=HEAD_DIM,
        tokens=np.array([7, 2**59]),
        k=readings(100),
        v=readings(5000),
    )


SAMPLE = re.compile(r'^([a-z_0-9:]+)\{((?:[a-z]+="[^"]*",?)+)\} (\S+)$')


def parse(text):
    """Reads exposition text strictly: {(name, labels): value}, {name: type}."""
    samples, types, helped = {}, {}, set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name in helped
            assert name not in types
            types[name] = kind
        else:
            name, labels, value = SAMPLE.match(line).groups()
            key = name, tuple(re.findall(r'([a-z]+)="([^"]*)"', labels))
            assert name == list(types)[-1], "samples follow their own header"
            assert key not in samples
            samples[key] = value
    return samples, types


def test_prometheus_text_has_every_count_exactly(summary):
    samples, types = parse(prometheus_text(summary))
    assert samples["fp8kv_kv_tokens_total", (("layer", "3"),)] == str(2**59)
    fields = {
        "fp8kv_kv_saturated_values_total": "saturated",
        "fp8kv_kv_saturated_tokens_total": "saturated_tokens",
        "fp8kv_kv_underflowed_values_total": "underflowed",
        "fp8kv_kv_nonfinite_values_total": "nonfinite",
        "fp8kv_kv_amax": "amax",
    }
    for name, field in fields.items():
        for tensor in "kv":
            for row, layer in enumerate(LAYERS):
                for head in range(NUM_HEADS):
                    labels = ("layer", layer), ("head", head), ("tensor", tensor)
                    key = name, tuple((k, str(v)) for k, v in labels)
                    value = getattr(getattr(summary, tensor), field)[row, head]
                    assert type(value.item())(samples.pop(key)) == value
    assert {types[name] for name in fields} == {"counter", "gauge"}


def test_counters_of_prometheus_end_in_total(summary):
    _, types = parse(prometheus_text(summary))
    for name, kind in types.items():
        assert name.endswith("_total") == (kind == "counter")


def test_the_histogram_is_cumulative_up_to_infinity(summary):
    samples, _ = parse(prometheus_text(summary))
    labels = ("layer", "1"), ("head", "1"), ("tensor", "v")
    found = [
        (dict(key)["le"], int(value))
        for (name, key), value in samples.items()
        if name == "fp8kv_kv_range_values_total" and key[:3] == labels
    ]
    assert [float(le) for le, _ in found] == bin_edges().tolist()
    assert found[-1][0] == "+Inf"
    expected = np.cumsum(summary.v.histogram[0, 1])
    assert [value for _, value in found] == expected.tolist()


def test_json_lines_have_every_count_exactly(summary):
    header, *records = map(json.loads, json_lines(summary).splitlines())
    assert header["bin_edges"] == [*bin_edges()[:-1].tolist(), None]
    assert (header["version"], header["head_dim"]) == (1, HEAD_DIM)
    cells = [(r["layer"], r["head"], r["tensor"]) for r in records]
    assert cells == [(i, h, t) for i in LAYERS for h in range(2) for t in "kv"]
    for record in records:
        row = LAYERS.index(record["layer"])
        of = getattr(summary, record["tensor"])
        for name in ("saturated", "saturated_tokens", "underflowed", "nonfinite"):
            assert record[name] == getattr(of, name)[row, record["head"]]
        assert np.float32(record["amax"]) == of.amax[row, record["head"]]
        assert record["histogram"] == of.histogram[row, record["head"]].tolist()
        assert record["tokens"] == summary.tokens[row]
        assert record["values"] == summary.tokens[row] * HEAD_DIM


def test_nothing_counted_is_valid_text(summary):
    def zero(of):
        names = ("amax", "saturated", "saturated_tokens", "underflowed", "nonfinite")
        zeros = {n: np.zeros_like(getattr(of, n)) for n in (*names, "histogram")}
        return replace(of, **zeros)

    nothing = replace(summary, tokens=np.zeros(2, int), k=zero(summary.k))
    samples, _ = parse(prometheus_text(nothing))
    assert samples["fp8kv_kv_tokens_total", (("layer", "1"),)] == "0"
    json_lines(nothing)
