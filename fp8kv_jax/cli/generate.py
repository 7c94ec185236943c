"""`fp8kv generate`: continues prompts through an FP8 KV cache that calibrates online."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.cli import options, report
from fp8kv_jax.cli.devices import load_on
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.model import choose_dtype, encode_prompts
from fp8kv_jax.cli.prompts import read_prompts
from fp8kv_jax.cli.screen import Screen
from fp8kv_jax.cli.static_scales import (
    StaticScales,
    check_flags,
    follow_scales,
    load_scales,
    save_scales,
)
from fp8kv_jax.cli.transcript import Transcript
from fp8kv_jax.generation import (
    Compiling,
    Event,
    Frozen,
    GenerationConfig,
    Generator,
    Prefilled,
    Token,
)

if TYPE_CHECKING:
    from models.loading import LoadedModel


def generate(
    prompt: options.Prompts = None,
    prompt_file: options.PromptFiles = None,
    chat: options.Chat = False,
    model: options.Model = None,
    dtype: options.Dtype = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    kv_cache_dtype: options.CacheDtype = options.KvCacheDtype.FP8,
    fp8_kv_calibration_tokens: options.CalibrationTokens = 256,
    fp8_kv_headroom: options.Headroom = 2.0,
    fp8_kv_granularity: options.Granularity = options.ScaleGranularity.TENSOR,
    fp8_kv_scales: options.Scales = None,
    fp8_kv_uncovered_layers: options.Uncovered = options.UncoveredLayers.BF16,
    allow_mismatch: options.AllowMismatch = None,
    save_fp8_kv_scales: options.SaveScales = None,
    kv_high_precision_layers: options.HighPrecisionLayers = "none",
    page_size: options.PageSize = 128,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Continues prompts through an FP8 KV cache that calibrates its scales online.

    Text goes to stdout, everything else to stderr. Several prompts are decoded as one
    batch.
    """
    with checking_input():
        generation = GenerationConfig(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        calibration = CalibrationConfig(
            window_tokens=fp8_kv_calibration_tokens,
            headroom=fp8_kv_headroom,
            granularity=fp8_kv_granularity.value,
        )
    request = _Request(
        texts=read_prompts(prompt or [], prompt_file or []),
        chat=chat,
        model=model,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        kv_cache_dtype=kv_cache_dtype,
        high_precision_layers=options.parse_layers(kv_high_precision_layers),
        page_size=page_size,
        generation=generation,
        calibration=calibration,
        scales=fp8_kv_scales,
        uncovered_layers=fp8_kv_uncovered_layers,
        allow_mismatch=allow_mismatch,
        save_to=save_fp8_kv_scales,
        as_json=as_json,
        verbose=verbose,
    )
    _run(request)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A command line, checked as far as that goes without a model."""

    texts: list[str]
    chat: bool
    model: Path | None
    dtype: options.ComputeDtype | None
    tensor_parallel_size: int
    kv_cache_dtype: options.KvCacheDtype
    high_precision_layers: tuple[int, ...]
    page_size: int
    generation: GenerationConfig
    calibration: CalibrationConfig
    scales: Path | None
    uncovered_layers: options.UncoveredLayers
    allow_mismatch: str | None
    save_to: Path | None
    as_json: bool
    verbose: bool

    def __post_init__(self) -> None:
        check_flags(
            self.scales,
            self.uncovered_layers,
            self.allow_mismatch,
            self.kv_cache_dtype,
            self.save_to,
        )
        fp8 = self.kv_cache_dtype == "fp8"
        if fp8 and not (self.calibration.window_tokens or self.scales):
            raise UserError(
                "Expected --fp8-kv-calibration-tokens of at least 1, got 0: that means "
                "no online calibration, and no scales are given."
            )


def _run(request: _Request) -> None:
    progress = _Progress()
    with Screen(progress.line) as screen:
        dtype = choose_dtype(request.dtype)
        model, placement = load_on(request.tensor_parallel_size, request.model, dtype)
        prompts = encode_prompts(model, request.texts, chat=request.chat)
        static, request = _with_scales(request, model)
        cache_config, max_seq_len = _plan_cache(request, model, dtype, prompts)
        generator = Generator(
            model.forward,
            model.params,
            cache_config,
            request.calibration,
            num_seqs=len(prompts),
            max_seq_len=max_seq_len,
            scales=static.scale_set if static else None,
            placement=placement,
        )
        transcript = Transcript(
            request.texts,
            [model.tokenizer.stream_decoder() for _ in prompts],
            (lambda text: None) if request.as_json else screen.write,
        )
        progress.watch(generator, sum(map(len, prompts)))
        eos_ids = model.tokenizer.eos_ids
        for event in generator.generate(prompts, request.generation, eos_ids=eos_ids):
            progress.take(event)
            match event:
                case Token():
                    transcript.push(event)
                case Frozen():
                    screen.note(report.freeze_line(event))
    run = report.make_report(generator, cache_config, request.calibration, static)
    if request.as_json:
        print(json.dumps(report.as_json(run, transcript.outputs()), allow_nan=False))
    sys.stdout.flush()
    _print_summary(screen, run, request)
    if request.save_to is not None:
        lengths = list(
            zip(map(len, prompts), map(len, transcript.token_ids), strict=True)
        )
        artifact_id = save_scales(
            request.save_to,
            model,
            generator.calibration,
            request.calibration,
            parent=static.artifact_id if static else None,
            lengths=lengths,
        )
        screen.note(f"wrote {request.save_to} (artifact {artifact_id})")


def _with_scales(
    request: _Request, model: "LoadedModel"
) -> tuple[StaticScales | None, _Request]:
    """Loads the scales asked for, and lets the request follow them."""
    if request.scales is None:
        return None, request
    static = load_scales(request.scales, model, allow_mismatch=request.allow_mismatch)
    changes = follow_scales(
        static,
        request.calibration,
        request.high_precision_layers,
        request.uncovered_layers,
    )
    return static, replace(request, **changes)


def _plan_cache(
    request: _Request,
    model: "LoadedModel",
    dtype: options.ComputeDtype,
    prompts: list[list[int]],
) -> tuple[CacheConfig, int]:
    """Sizes the cache for these prompts: its configuration, and the longest sequence.

    The block table's width is a power of two of pages, so that few widths occur.
    """
    config = model.config
    wide = "float32" if dtype == "float32" else "bf16"
    asked = request.kv_cache_dtype
    with checking_input():
        cache = CacheConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_pages=1,
            page_size=request.page_size,
            dtype=wide if asked == "auto" else asked.value,
            high_precision_layers=request.high_precision_layers,
            high_precision_dtype=wide,
        )
    room = request.generation.max_new_tokens
    lengths = [min(len(ids) + room, config.max_context) for ids in prompts]
    pages = [-(-length // cache.page_size) for length in lengths]
    width = 1 << (max(pages) - 1).bit_length()
    max_seq_len = min(width * cache.page_size, config.max_context)
    return replace(cache, num_pages=sum(pages)), max_seq_len


def _print_summary(screen: Screen, run: report.Report, request: _Request) -> None:
    if run.static is not None:
        screen.note(report.static_line(run.static))
    if run.calibrates and run.frozen_at is None:
        screen.note(report.never_frozen_line(run))
    screen.note(report.timing_line(run.timing))
    if request.as_json and not request.verbose:
        return
    screen.note(report.cache_table(run))
    if run.layers:
        screen.note(report.scales_table(run))
        if request.verbose:
            screen.note(report.layers_table(run))


class _Progress:
    """What the status line says."""

    def __init__(self) -> None:
        self._phase = "loading the model"
        self._generator: Generator | None = None
        self._num_prompt_tokens = 0
        self._num_shapes = 0

    def watch(self, generator: Generator, num_prompt_tokens: int) -> None:
        self._generator = generator
        self._num_prompt_tokens = num_prompt_tokens

    def take(self, event: Event) -> None:
        assert self._generator is not None
        timing = self._generator.timing
        match event:
            case Compiling():
                self._num_shapes += 1
                shapes = "shape" if self._num_shapes == 1 else "shapes"
                self._phase = f"compiling the step in {self._num_shapes} {shapes}"
            case Prefilled():
                seen = timing.prefill_tokens
                self._phase = f"prefill: {seen} of {self._num_prompt_tokens} tokens"
            case Token() if timing.decode_tokens_per_s:
                self._phase = f"{timing.decode_tokens_per_s:.1f} tokens/s"

    def line(self) -> str:
        generator = self._generator
        if generator is None or not generator.calibrates:
            return self._phase
        if generator.frozen_at is not None:
            return f"{self._phase} | scales frozen at {generator.frozen_at} tokens"
        window = generator.window_tokens
        return (
            f"{self._phase} | calibrating: {generator.tokens_seen} of {window} tokens"
        )
