"""`fp8kv sweep`: how large a calibration window is enough, and for which traffic?"""

import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8kv_jax.cli import options
from fp8kv_jax.cli import sweep_options as flags
from fp8kv_jax.cli.calibrate import parse_source
from fp8kv_jax.cli.errors import UserError, checking_input, print_warning
from fp8kv_jax.cli.model import choose_dtype, load, make_encoder
from fp8kv_jax.cli.options import check_least
from fp8kv_jax.cli.sweep_options import parse_list, parse_seeds
from fp8kv_jax.cli.sweep_report import Done, report
from fp8kv_jax.cli.sweep_screen import SweepScreen
from fp8kv_jax.drift.sweep import Outcome, run_sweep
from fp8kv_jax.drift.sweep_grid import Grid, resolve_orders
from fp8kv_jax.drift.sweep_quality import (
    MAX_MEASURED,
    Quality,
    choose,
    measure,
    pick_texts,
    scale_set_of,
    scales_key,
)
from fp8kv_jax.drift.sweep_record import record_rows
from fp8kv_jax.drift.trace import Trace, TraceShape, open_trace, write_trace
from fp8kv_jax.scales.corpus import DataSource
from fp8kv_jax.scales.sample_plan import make_plan

if TYPE_CHECKING:
    from models.loading import LoadedModel


def sweep(
    trace: flags.TraceFile = None,
    data: flags.Data = None,
    record: flags.Record = None,
    model: options.Model = None,
    dtype: options.Dtype = None,
    num_samples: flags.NumSamples = 32,
    max_seq_len: flags.MaxSeqLen = 512,
    seed: flags.Seed = 0,
    order: flags.Orders = None,
    order_seeds: flags.OrderSeeds = "none",
    held_out: flags.HeldOut = "",
    windows: flags.Windows = "1,16,64,256,1024,4096",
    chunk: flags.Chunks = "64",
    granularity: flags.Granularities = "tensor",
    headroom: flags.Headrooms = "2",
    rule: flags.Rules = "amax",
    number_format: flags.Formats = "fp8_e4m3",
    quality_settings: flags.QualitySettings = MAX_MEASURED,
    quality_tokens: flags.QualityTokens = 1024,
    csv: flags.Csv = None,
    plots: flags.Plots = None,
    as_json: options.Json = False,
) -> None:
    """Finds the scales that each calibration window would freeze, and what they lose.

    Works on a recorded trace of keys and values, or records one from --data; one pass
    over it serves all settings. With a model, KL and top-1 of the few settings that
    matter are measured too: of at most 8 different scale sets, the extreme windows
    of each line of settings first, then those between.
    """
    _check_plots(plots)
    # An order stands in for those that the trace's classes give.
    with checking_input():
        grid = Grid(
            orders=tuple(parse_list("--order", text, str) for text in order or ["*"]),
            seeds=parse_seeds(order_seeds),
            chunks=parse_list("--chunk", chunk, int),
            windows=parse_list("--windows", windows, int),
            granularities=parse_list("--granularity", granularity, str),  # type: ignore[arg-type]
            headrooms=parse_list("--headroom", headroom, float),
            rules=parse_list("--rule", rule, str),
            number_formats=parse_list("--format", number_format, str),
        )
    request = _Request(
        trace=trace,
        sources=[parse_source(text) for text in data or []],
        record=record,
        model=model,
        dtype=dtype,
        num_samples=num_samples,
        max_seq_len=max_seq_len,
        seed=seed,
        grid=grid,
        has_orders=bool(order),
        held_out=parse_list("--held-out", held_out, str) if held_out else (),
        quality_settings=quality_settings,
        quality_tokens=quality_tokens,
    )
    report(_run(request), as_json=as_json, csv=csv, plots=plots)


def _check_sources(
    trace: Path | None, sources: Sequence[DataSource], record: Path | None
) -> None:
    if (trace is None) == (not sources):
        raise UserError(
            "Expected --trace FILE, a recorded K/V trace, or --data PATH, text to "
            "record one from, and not both."
        )
    if record is not None and not sources:
        raise UserError("Expected --data beside --record: what should be recorded?")


def _check_plots(plots: Path | None) -> None:
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "Expected matplotlib for --plots, but it is not installed: install the "
            "`plot` extra, or leave --plots out."
        )


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A command line, checked as far as that goes without trace and model."""

    trace: Path | None
    sources: list[DataSource]
    record: Path | None
    model: Path | None
    dtype: options.ComputeDtype | None
    num_samples: int
    max_seq_len: int
    seed: int
    grid: Grid
    has_orders: bool
    held_out: tuple[str, ...]
    quality_settings: int
    quality_tokens: int

    def __post_init__(self) -> None:
        _check_sources(self.trace, self.sources, self.record)
        check_least(
            1,
            num_samples=self.num_samples,
            max_seq_len=self.max_seq_len,
            quality_tokens=self.quality_tokens,
        )
        if not 0 <= self.quality_settings <= MAX_MEASURED:
            raise UserError(
                f"Expected --quality-settings of 0 to {MAX_MEASURED}, got "
                f"{self.quality_settings}."
            )


def _run(request: _Request) -> Done:
    started = time.monotonic()
    with ExitStack() as stack:
        screen = stack.enter_context(SweepScreen())
        model = None
        if request.sources or request.model is not None:
            screen.phase("loading the model")
            model = load(request.model, choose_dtype(request.dtype))
        path = request.trace
        if path is None:
            assert model is not None
            path = request.record
            if path is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                path = Path(folder, "recorded.safetensors")
            _record(request, model, path, screen)
        with checking_input():
            trace = open_trace(path)
            orders = request.grid.orders if request.has_orders else ()
            orders = resolve_orders(orders, trace.classes, request.held_out)
            grid = dataclasses.replace(request.grid, orders=orders)
        screen.phase("reading the trace", trace.num_tokens)
        outcomes = run_sweep(
            trace, grid, held_out=request.held_out, advance=screen.advance
        )
        swept = time.monotonic()
        quality: list[dict[str, Quality] | None] = [None] * len(outcomes)
        if model is not None and request.quality_settings:
            quality = _measure(request, model, trace, outcomes, screen)
    return Done(
        trace=trace,
        outcomes=outcomes,
        quality=quality,
        sweep_s=swept - started,
        total_s=time.monotonic() - started,
    )


def _record(
    request: _Request, model: "LoadedModel", path: Path, screen: SweepScreen
) -> None:
    """Records the trace that the sweep then reads."""
    from models.full_attention import full_attention

    for source in request.sources:
        if set(source.class_name) & set("/,*"):
            raise UserError(
                "Expected names of --data without / , and *, got "
                f"{source.class_name!r}: an order lists them."
            )
    config = model.config
    screen.phase("reading the data")
    with checking_input():
        plan = make_plan(
            request.sources,
            make_encoder(model),
            num_samples=request.num_samples,
            max_seq_len=min(request.max_seq_len, config.max_context),
            seed=request.seed,
            bos_id=model.tokenizer.bos_id,
        )
    texts = {
        f"{plan.classes[sample.class_index]}/{index:05d}": sample.token_ids
        for index, sample in enumerate(plan.samples)
    }
    screen.phase("recording", plan.num_tokens)
    rows = record_rows(
        model.forward,
        model.params,
        full_attention,
        list(texts.values()),
        advance=screen.advance,
    )
    try:
        write_trace(path, texts, rows, shape=_shape_of(model))
    except OSError as error:
        raise UserError(f"Expected to write {path}: {error.strerror}.") from error


def _shape_of(model: "LoadedModel") -> TraceShape:
    config = model.config
    return TraceShape(config.num_layers, config.num_kv_heads, config.head_dim)


def _measure(
    request: _Request,
    model: "LoadedModel",
    trace: Trace,
    outcomes: Sequence[Outcome],
    screen: SweepScreen,
) -> list[dict[str, Quality] | None]:
    """Measures the outcomes that matter; others of equal scales share the result."""
    shape = _shape_of(model)
    if shape != trace.shape:
        raise UserError(
            "Expected --model to be the model of the trace, with layers, KV heads and "
            f"head size {list(trace.shape)}, got one with {list(shape)}."
        )
    chosen = choose(outcomes, request.quality_settings)
    if not chosen:
        print_warning(
            "no window was filled by its order in format fp8_e4m3: there is nothing "
            "to measure KL and top-1 of."
        )
        return [None] * len(outcomes)
    unseen = set.intersection(*(set(outcome.held_out) for outcome in outcomes))
    classes = [c for c in trace.classes if c in unseen] or list(trace.classes)
    with checking_input():
        texts = pick_texts(trace, classes, request.quality_tokens)
    num_tokens = sum(len(text.token_ids) for text in texts)
    screen.phase(f"measuring {len(chosen)} scale sets", num_tokens)
    is_float32 = choose_dtype(request.dtype) is options.ComputeDtype.FLOAT32
    found = measure(
        model.forward,
        model.params,
        texts,
        [scale_set_of(outcomes[index]) for index in chosen],
        shape=shape,
        reference_dtype="float32" if is_float32 else "bf16",
        advance=screen.advance,
    )
    by_scales = {
        scales_key(outcomes[index]): quality
        for index, quality in zip(chosen, found, strict=True)
    }
    return [by_scales.get(scales_key(outcome)) for outcome in outcomes]
