"""What a server shows to Prometheus."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fp8kv_jax import counters as counter
from fp8kv_jax.calibration import FROZEN, CalibrationState
from fp8kv_jax.serving.engine import Engine
from fp8kv_jax.serving.request import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCIES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_GAUGES = {
    "num_waiting": ("requests_waiting", "Continuations that wait for pages."),
    "num_running": ("requests_running", "Continuations that hold pages."),
    "num_pages": ("pages", "Pages of the pool."),
    "num_used_pages": ("pages_used", "Pages that continuations hold."),
    "num_cached_pages": ("pages_cached", "Pages kept for their prefix alone."),
    "num_host_pages": ("pages_host", "Pages kept in host memory."),
    "window_tokens": ("calibration_window_tokens", "Tokens that freeze the scales."),
    "tokens_seen": ("calibration_tokens_seen", "Tokens observed for the scales."),
    "frozen": ("calibration_frozen", "1 once the scales are final."),
    "has_window": ("calibration_window_held", "1 while the window takes memory."),
    "epoch": ("calibration_epoch", "Counts freezes and resets."),
}
_COUNTERS = {
    "num_steps": ("steps", "Steps run."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens admitted."),
    "num_cached_tokens": ("cached_tokens", "Prompt tokens found in shared pages."),
    "num_output_tokens": ("output_tokens", "Tokens generated."),
    "num_computed_tokens": ("computed_tokens", "Tokens that went through the model."),
    "num_preemptions": ("preemptions", "Continuations recomputed for want of pages."),
    "num_page_copies": ("page_copies", "Pages copied before a write."),
    "num_evictions": ("evictions", "Cached pages given up."),
    "num_finished": ("continuations_finished", "Continuations that ended."),
    "num_aborted": ("continuations_aborted", "Continuations that were aborted."),
}
_TALLIES = {
    "saturated": "Values clipped at the frozen scale.",
    "underflowed": "Values other than 0 that became 0 at the frozen scale.",
    "nonfinite": "Values that were NaN or infinite.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """An engine between two steps, on the host.

    Attributes:
      stats: its counts.
      state: its calibration, without the window.
    """

    stats: Stats
    state: CalibrationState


def observe(engine: Engine) -> Observation:
    """Reads an engine; called in its thread. Waits for the device."""
    state = replace(engine.calibration, staged=None)
    return Observation(stats=engine.stats(), state=jax.device_get(state))


class Metrics:
    """Histograms that the worker fills, and the newest observation of the engine.

    Attributes:
      observation: what the engine's own numbers are taken from.
    """

    def __init__(self) -> None:
        self.observation: Observation | None = None
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(self))
        self._first = self._histogram(
            "time_to_first_token", "From arrival to the first token."
        )
        self._next = self._histogram(
            "time_per_output_token", "Mean time between tokens of a continuation."
        )
        self._all = self._histogram(
            "request_duration", "From arrival to the end of a continuation."
        )
        self.responses = Counter(
            "fp8kv_http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        name = f"fp8kv_{name}_seconds"
        return Histogram(name, text, buckets=_LATENCIES, registry=self.registry)

    def text(self) -> bytes:
        """Everything in the text format."""
        return generate_latest(self.registry)

    def time(self) -> "Timer":
        return Timer(self._first, self._next, self._all)


class Timer:
    """Times one continuation, from its arrival on."""

    def __init__(self, first: Histogram, following: Histogram, all_: Histogram) -> None:
        self._histograms = first, following, all_
        self._start = time.perf_counter()
        self._first_at: float | None = None

    def token(self) -> None:
        if self._first_at is None:
            self._first_at = time.perf_counter()
            self._histograms[0].observe(self._first_at - self._start)

    def end(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._first_at is not None and num_tokens > 1:
            self._histograms[1].observe((now - self._first_at) / (num_tokens - 1))
        self._histograms[2].observe(now - self._start)


class _EngineCollector(Collector):
    """The engine's numbers, from the newest observation."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        observation = self._metrics.observation
        if observation is None:
            return
        stats = observation.stats
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"fp8kv_{name}", text, getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"fp8kv_{name}", text, getattr(stats, field))
        yield from _layer_metrics(observation.state)

    def describe(self) -> Iterable[Metric]:
        return ()


def _layer_metrics(state: CalibrationState) -> Iterator[Metric]:
    """Scales, amax and counts of each FP8 layer; `group` is a head or all of them."""
    for name, text in (
        ("scale", "Multiplier out of FP8; provisional until frozen."),
        ("amax", "Largest finite value that the scale rests on."),
        ("live_amax", "Largest finite value since the scales are final."),
    ):
        labels = ["tensor", "layer", "group"]
        family = GaugeMetricFamily(f"fp8kv_{name}", text, labels=labels)
        for which in "kv":
            values = np.asarray(getattr(state, f"{which}_{name}"))
            for layer, row in zip(state.fp8_layers, values, strict=True):
                for group, value in enumerate(row.tolist()):
                    family.add_metric([which, str(layer), str(group)], value)
        yield family
    for name, text in _TALLIES.items():
        yield _tally(state, name, text)


def _tally(state: CalibrationState, name: str, text: str) -> Metric:
    family = CounterMetricFamily(
        f"fp8kv_{name}_values", text, labels=["tensor", "layer"]
    )
    tallies: Mapping[str, object] = {"k": state.k_tally, "v": state.v_tally}
    for which, tally in tallies.items():
        counts = counter.total(getattr(tally, name))
        # A value that is not finite does not depend on the scale's phase.
        counts = counts.sum(axis=0) if name == "nonfinite" else counts[FROZEN]
        for layer, row in zip(state.fp8_layers, counts, strict=True):
            family.add_metric([which, str(layer)], int(row.sum()))
    return family
