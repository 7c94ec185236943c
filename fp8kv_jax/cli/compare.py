"""`fp8kv compare`: a canary of two artifacts, weights and load held constant."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import typer

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.cli import compare_options as flags
from fp8kv_jax.cli import options, replay_options
from fp8kv_jax.cli.compare_report import show
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.model import choose_dtype, load, make_encoder
from fp8kv_jax.cli.options import check_least
from fp8kv_jax.cli.replay_screen import ReplayScreen
from fp8kv_jax.cli.static_scales import StaticScales, load_scales
from fp8kv_jax.drift.capacity import count_capacity
from fp8kv_jax.drift.compare import (
    Candidate,
    PairedQuality,
    judge_quality,
    perplexities,
)
from fp8kv_jax.drift.compare_result import (
    Bounds,
    Comparison,
    Measure,
    Side,
    conclude,
    judge,
)
from fp8kv_jax.drift.compare_statistics import Estimate
from fp8kv_jax.drift.compare_timing import PairedTiming, judge_timing
from fp8kv_jax.drift.workload import (
    Encode,
    Sample,
    encode_sample,
    read_samples,
    scan,
)
from fp8kv_jax.drift.workload_draw import Draw
from fp8kv_jax.scales.manifest import library_versions, utc_now

if TYPE_CHECKING:
    from models.loading import LoadedModel

NOT_AS_GOOD = 1


def compare(
    a: flags.A,
    b: flags.B,
    workload: flags.Workload,
    model: options.Model = None,
    dtype: options.Dtype = None,
    allow_mismatch: options.AllowMismatch = None,
    prompts: flags.NumPrompts = 32,
    max_prompt_tokens: replay_options.MaxPromptTokens = 2048,
    max_new_tokens: options.MaxNewTokens = 32,
    concurrency: flags.Concurrency = 4,
    repeats: flags.Repeats = 2,
    draws: flags.Draws = 2000,
    max_kl_increase: flags.MaxKlIncrease = 0.002,
    max_top1_drop: flags.MaxTop1Drop = 0.01,
    max_perplexity_increase: flags.MaxPerplexityIncrease = 0.01,
    max_slowdown: flags.MaxSlowdown = 0.1,
    tokens_per_step: replay_options.TokensPerStep = 512,
    seed: options.Seed = 0,
    page_size: options.PageSize = 128,
    as_json: options.Json = False,
) -> None:
    """Compares two artifacts on the same prompts: quality, memory and speed.

    Exit code 0: B is better than A, or no worse within the bounds. 1: it is worse, or
    the intervals are too wide to say that it is not. 2: an error.
    """
    with checking_input():
        bounds = Bounds(
            kl=max_kl_increase,
            top1=max_top1_drop,
            perplexity=max_perplexity_increase,
            speed=max_slowdown,
        )
    request = _Request(
        workload=workload,
        num_prompts=prompts,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        repeats=repeats,
        draws=draws,
        bounds=bounds,
        tokens_per_step=tokens_per_step,
        seed=seed,
        page_size=page_size,
    )
    started = time.monotonic()
    dtype = choose_dtype(dtype)
    with ReplayScreen() as screen:
        screen.phase("loading the model")
        loaded = load(model, dtype)
        screen.phase("reading the scales")
        sides = [load_scales(x, loaded, allow_mismatch=allow_mismatch) for x in (a, b)]
        name = "the demo model" if model is None else model.name
        run = _Run(request, loaded, dtype, sides)
        comparison = run.compare(screen, model_name=name, started=started)
    show(comparison, as_json=as_json)
    if comparison.verdict in ("worse", "unclear"):
        raise typer.Exit(NOT_AS_GOOD)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A command line, checked as far as that goes without a model."""

    workload: Path
    num_prompts: int
    max_prompt_tokens: int
    max_new_tokens: int
    concurrency: int
    repeats: int
    draws: int
    bounds: Bounds
    tokens_per_step: int
    seed: int
    page_size: int

    def __post_init__(self) -> None:
        check_least(2, prompts=self.num_prompts)
        check_least(1, max_prompt_tokens=self.max_prompt_tokens)
        check_least(1, max_new_tokens=self.max_new_tokens)
        check_least(1, concurrency=self.concurrency)
        check_least(0, repeats=self.repeats)
        check_least(100, draws=self.draws)
        check_least(16, tokens_per_step=self.tokens_per_step)
        if self.workload.suffix == ".safetensors":
            raise UserError(
                f"Expected --workload with prompts, got the trace {self.workload}: "
                "nothing can be generated from it."
            )


class _Run:
    """The phases of a comparison."""

    def __init__(
        self,
        request: _Request,
        model: "LoadedModel",
        dtype: options.ComputeDtype,
        sides: Sequence[StaticScales],
    ) -> None:
        room = request.max_new_tokens if request.repeats else 0
        self.request = request
        self.model = model
        self.dtype = dtype
        self.wide = "float32" if dtype == "float32" else "bf16"
        self.longest = min(request.max_prompt_tokens, model.config.max_context - room)
        if self.longest < 1:
            raise UserError(
                f"Expected --max-new-tokens below {model.config.max_context}, the "
                f"model's context, got {room}."
            )
        self.sides = sides
        self.a, self.b = (self._candidate(side) for side in sides)

    def _candidate(self, side: StaticScales) -> Candidate:
        config = self.model.config
        with checking_input():
            cache = CacheConfig(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                num_pages=1,
                page_size=self.request.page_size,
                high_precision_layers=side.uncovered,
                high_precision_dtype=self.wide,
            )
        return Candidate(scales=side.scale_set, cache=cache)

    def compare(
        self, screen: ReplayScreen, *, model_name: str, started: float
    ) -> Comparison:
        request = self.request
        screen.phase("reading the workload")
        encode = make_encoder(self.model)
        with checking_input():
            tally = scan(request.workload, encode, max_tokens=self.longest)
            scored, served = self._draw(encode)
        quality = self._score(scored, screen)
        timing = self._time(served, screen)
        shared: dict[str, Any] = {"draws": request.draws, "seed": request.seed}
        measures = judge_quality(quality, request.bounds, **shared)
        measures.append(self._judge_capacity(scored))
        if len(timing):
            measures += judge_timing(timing, request.bounds, **shared)
        sides = (self._side(*x) for x in zip(self.sides, (self.a, self.b), strict=True))
        settings = asdict(request) | {"dtype": self.dtype.value}
        settings |= {"platform": jax.default_backend()}
        del settings["workload"]
        side_a, side_b = sides
        return Comparison(
            created_at=utc_now(),
            library_versions=library_versions(),
            model_name=model_name,
            workload_name=request.workload.name,
            workload_sha256=tally.sha256,
            num_prompts=len(scored),
            num_tokens=sum(map(len, scored)),
            perplexity=perplexities(quality),
            num_rounds=len(timing),
            settings=settings,
            a=side_a,
            b=side_b,
            measures=tuple(measures),
            verdict=conclude(measures),
            seconds=time.monotonic() - started,
        )

    def _draw(self, encode: Encode) -> tuple[list[list[int]], list[list[int]]]:
        """Draws samples: their token ids, and those of the prompts to continue."""
        request = self.request
        draw = Draw[Sample](request.num_prompts, seed=request.seed)
        for sample in read_samples(request.workload):
            draw.offer(sample, key=str(sample.line), data_class=sample.data_class)
        samples = draw.items()
        if len(samples) < 2:
            raise ValueError(
                f"Expected at least 2 samples in {request.workload}, to tell A and B "
                f"from chance, found {len(samples)}."
            )
        both = [
            [
                encode_sample(x, encode, request.workload, answer=answer)[
                    : self.longest
                ]
                for x in samples
            ]
            for answer in (False, True)
        ]
        return both[0], both[1]

    def _score(self, prompts: list[list[int]], screen: ReplayScreen) -> np.ndarray:
        run = PairedQuality(
            self.model.forward,
            self.model.params,
            self.a,
            self.b,
            wide_dtype=self.wide,
            max_tokens=max(map(len, prompts)),
            tokens_per_step=self.request.tokens_per_step,
        )
        total = sum(map(len, prompts))
        with checking_input():
            screen.watch("scoring", run.run(prompts), total=total, unit="tokens")
        return np.stack(run.rows)

    def _time(self, prompts: list[list[int]], screen: ReplayScreen) -> np.ndarray:
        if not self.request.repeats:
            return np.zeros((0, 0))
        run = PairedTiming(
            self.model.forward,
            self.model.params,
            (self.a, self.b),
            prompts,
            max_new_tokens=self.request.max_new_tokens,
            concurrency=self.request.concurrency,
        )
        repeats = self.request.repeats
        total = run.num_runs(repeats)
        screen.watch("serving", run.run(repeats), total=total, unit="runs")
        return np.stack(run.rows)

    def _judge_capacity(self, prompts: list[list[int]]) -> Measure:
        lengths = np.bincount([len(prompt) for prompt in prompts])
        a, b = (
            count_capacity(x.cache, lengths, groups=x.scales.groups).fp8.total
            for x in (self.a, self.b)
        )
        figures = (Estimate(value=a), Estimate(value=b), Estimate(value=b / a - 1))
        return judge(
            figures,
            name="cache_bytes",
            unit="bytes",
            change_kind="relative",
            bound=self.request.bounds.cache_bytes,
        )

    def _side(self, scales: StaticScales, candidate: Candidate) -> Side:
        return Side(
            artifact_id=scales.artifact_id,
            granularity=scales.scale_set.granularity,
            uncovered_layers=scales.uncovered,
            allowed_mismatches=tuple(scales.allowed_mismatches),
            bytes_per_token=candidate.cache.bytes_per_token,
        )
