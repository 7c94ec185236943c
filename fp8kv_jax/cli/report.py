"""What a run did to its cache and its scales, as JSON and as tables."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from fp8kv_jax import counters as counter
from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import (
    FROZEN,
    PROVISIONAL,
    CalibrationConfig,
    CalibrationState,
)
from fp8kv_jax.cli.static_scales import StaticScales
from fp8kv_jax.generation import Frozen, Generator, Timing


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One FP8 layer. Scales and amax by group; counts over K, V and all groups.

    `saturated` and `underflowed` count under the frozen scales, `provisional_*` inside
    the window; `nonfinite` does not depend on a scale and counts over both.
    """

    layer: int
    k_scale: np.ndarray
    v_scale: np.ndarray
    k_amax: np.ndarray
    v_amax: np.ndarray
    saturated: int
    underflowed: int
    provisional_saturated: int
    provisional_underflowed: int
    nonfinite: int
    no_signal: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run on the host: configurations, what was seen, and each FP8 layer.

    `static` says where scales came from that were not found online.
    """

    cache_config: CacheConfig
    calibration_config: CalibrationConfig
    pool_bytes: int
    tokens_seen: int
    frozen_at: int | None
    requantized_tokens: int
    layers: dict[int, LayerReport]
    calibrates: bool
    static: StaticScales | None
    timing: Timing


def make_report(
    generator: Generator,
    cache_config: CacheConfig,
    calibration_config: CalibrationConfig,
    static: StaticScales | None = None,
) -> Report:
    """Reads a generator's final state from the device."""
    state = jax.device_get(replace(generator.calibration, staged=None))
    per_head = calibration_config.granularity == "head"
    layers = {
        layer: _layer_report(state, row, layer, per_head)
        for row, layer in enumerate(state.fp8_layers)
    }
    return Report(
        cache_config=cache_config,
        calibration_config=calibration_config,
        pool_bytes=generator.cache.nbytes,
        tokens_seen=generator.tokens_seen,
        frozen_at=generator.frozen_at,
        requantized_tokens=int(state.num_requantized),
        layers=layers,
        calibrates=generator.calibrates,
        static=static,
        timing=generator.timing,
    )


def _layer_report(
    state: CalibrationState, row: int, layer: int, per_head: bool
) -> LayerReport:
    def count(name: str, *phases: int) -> int:
        tallies = [getattr(tally, name) for tally in (state.k_tally, state.v_tally)]
        return int(sum(counter.total(t[p, row]).sum() for t in tallies for p in phases))

    no_signal = [
        f"{name}[{group}]" if per_head else name
        for name, silent in zip("kv", state.no_signal, strict=True)
        for group in np.flatnonzero(silent[row])
    ]
    return LayerReport(
        layer=layer,
        k_scale=np.asarray(state.k_scale[row]),
        v_scale=np.asarray(state.v_scale[row]),
        k_amax=np.asarray(state.k_amax[row]),
        v_amax=np.asarray(state.v_amax[row]),
        saturated=count("saturated", FROZEN),
        underflowed=count("underflowed", FROZEN),
        provisional_saturated=count("saturated", PROVISIONAL),
        provisional_underflowed=count("underflowed", PROVISIONAL),
        nonfinite=count("nonfinite", PROVISIONAL, FROZEN),
        no_signal=tuple(no_signal),
    )


def as_json(report: Report, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes the object that `--json` prints.

    `frozen` is null where nothing calibrates, and so are all values of a layer that
    does not. `no_signal` lists groups: "k", or "k[2]" with a scale for each head.
    """
    cache, calibration = report.cache_config, report.calibration_config
    timing = report.timing
    return {
        "outputs": outputs,
        "kv_cache": {
            "dtype": cache.dtype,
            "bytes_per_token": cache.bytes_per_token,
            "pool_bytes": report.pool_bytes,
            "num_pages": cache.num_pages,
            "page_size": cache.page_size,
        },
        "calibration": {
            "requested_tokens": calibration.window_tokens,
            "tokens_seen": report.tokens_seen,
            "frozen": report.frozen_at is not None if report.calibrates else None,
            "frozen_at": report.frozen_at,
            "requantized_tokens": report.requantized_tokens,
            "headroom": calibration.headroom,
            "granularity": calibration.granularity,
            "static_scales": report.static.as_json() if report.static else None,
            "layers": [
                _layer_json(layer, report.layers.get(layer), calibration.granularity)
                for layer in range(cache.num_layers)
            ],
        },
        "timing": {
            "compile_s": timing.compile_s,
            "prefill_s": timing.prefill_s,
            "decode_s": timing.decode_s,
            "prefill_tokens": timing.prefill_tokens,
            "decode_tokens": timing.decode_tokens,
            "decode_tokens_per_s": timing.decode_tokens_per_s,
        },
    }


_BY_GROUP = ("k_scale", "v_scale", "k_amax", "v_amax")
_COUNTS = ("saturated", "underflowed", "nonfinite")


def _layer_json(
    layer: int, report: LayerReport | None, granularity: str
) -> dict[str, Any]:
    if report is None:
        return {"layer": layer} | dict.fromkeys((*_BY_GROUP, *_COUNTS, "no_signal"))
    values: dict[str, Any] = {"layer": layer}
    for name in _BY_GROUP:
        groups = getattr(report, name).tolist()
        values[name] = groups if granularity == "head" else groups[0]
    values |= {name: getattr(report, name) for name in _COUNTS}
    return values | {"no_signal": list(report.no_signal)}


def freeze_line(event: Frozen) -> str:
    batches = "batch" if event.num_batches == 1 else "batches"
    return (
        f"FP8 KV scales frozen after {_tokens(event.tokens_seen)} (requested "
        f"{event.window_tokens}); requantized {_tokens(event.num_requantized)} of "
        f"{event.num_batches} {batches}"
    )


def static_line(static: StaticScales) -> str:
    layers = len(static.scale_set.layers)
    line = f"FP8 KV scales of artifact {static.artifact_id} for {layers} layers"
    if static.uncovered:
        line += f"; none for layers {', '.join(map(str, static.uncovered))}"
    return "; ".join([line, *static.allowed_mismatches])


def never_frozen_line(report: Report) -> str:
    calibration = report.calibration_config
    return (
        f"FP8 KV scales not frozen: {report.tokens_seen} of "
        f"{_tokens(calibration.window_tokens)} of the window seen; all was written "
        f"and read at the provisional scale {calibration.provisional_scale:g}"
    )


def timing_line(timing: Timing) -> str:
    line = f"prefill: {_tokens(timing.prefill_tokens)} in {timing.prefill_s:.2f} s"
    if timing.decode_tokens_per_s is not None:
        line += (
            f"; decode: {_tokens(timing.decode_tokens)} in {timing.decode_s:.2f} s "
            f"({timing.decode_tokens_per_s:.1f} tokens/s)"
        )
    return f"{line}; compiling: {timing.compile_s:.1f} s"


def cache_table(report: Report) -> Table:
    """Shows what the cache takes beside what BF16 would take."""
    config = report.cache_config
    wide = replace(config, dtype="bf16", high_precision_layers=())
    table = Table("KV cache", "bytes/token", "pool bytes", box=box.SIMPLE)
    ratio = config.bytes_per_token / wide.bytes_per_token
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(
        f"{_dtype(config)} ({ratio:.0%} of bf16)",
        f"{config.bytes_per_token:,}",
        f"{report.pool_bytes:,}",
    )
    table.add_row(
        "bf16",
        f"{wide.bytes_per_token:,}",
        f"{wide.bytes_per_token * config.num_slots:,}",
    )
    return table


def _dtype(config: CacheConfig) -> str:
    kept = len(config.high_precision_layers)
    if config.dtype != "fp8" or not kept:
        return config.dtype
    return (
        f"{config.dtype}, but {config.high_precision_dtype} in {kept} of "
        f"{config.num_layers} layers"
    )


def scales_table(report: Report) -> Table:
    """Shows the spread of the scales over layers and groups, and what they cut off."""
    layers = list(report.layers.values())
    titles = ("scales", "min", "median", "max")
    table = Table(*titles, box=box.SIMPLE, caption=_counts_line(layers))
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("k_scale", "v_scale"):
        scales = np.concatenate([getattr(layer, name) for layer in layers])
        spread = (scales.min(), np.median(scales), scales.max())
        table.add_row(name, *(f"{value:.4g}" for value in spread))
    return table


def _counts_line(layers: list[LayerReport]) -> str:
    silent = [f"{x.layer}.{group}" for x in layers for group in x.no_signal]
    line = (
        f"after the freeze: {sum(x.saturated for x in layers):,} values saturated, "
        f"{sum(x.underflowed for x in layers):,} underflowed; "
        f"no_signal groups: {', '.join(silent) if silent else 'none'}"
    )
    nonfinite = sum(x.nonfinite for x in layers)
    return f"{line}; {nonfinite:,} values not finite" if nonfinite else line


def layers_table(report: Report) -> Table:
    """Shows every layer, and each of its groups on a line."""
    titles = ("layer", *_BY_GROUP, "saturated", "underflowed", "no_signal")
    caption = "counts: after the freeze + inside the window, at the provisional scale"
    table = Table(*titles, box=box.SIMPLE, pad_edge=False, caption=caption)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for layer in range(report.cache_config.num_layers):
        x = report.layers.get(layer)
        if x is None:
            dtype = report.cache_config.layer_dtype(layer)
            table.add_row(str(layer), dtype, dtype)
            continue
        table.add_row(
            str(layer),
            *("\n".join(f"{v:.3g}" for v in getattr(x, name)) for name in _BY_GROUP),
            f"{x.saturated}+{x.provisional_saturated}",
            f"{x.underflowed}+{x.provisional_underflowed}",
            " ".join(x.no_signal),
        )
    return table


def _tokens(number: int) -> str:
    return f"{number} token" if number == 1 else f"{number} tokens"
