"""The phases of `fp8kv replay` with a model, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.cli import options
from fp8kv_jax.cli import replay_options as flags
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.model import make_encoder
from fp8kv_jax.cli.replay_screen import ReplayScreen
from fp8kv_jax.drift.attribution import Attributor
from fp8kv_jax.drift.format_trials import FormatTrials
from fp8kv_jax.drift.formats import Format
from fp8kv_jax.drift.loss_sample import LossSample, Scales
from fp8kv_jax.drift.policy import Policy
from fp8kv_jax.drift.quality_generated import (
    GeneratedPrompt,
    generate_both,
    report_generated,
)
from fp8kv_jax.drift.replay import Replay, ReplayConfig, ReplaySequence
from fp8kv_jax.drift.result import (
    FormatReport,
    GeneratedReport,
    QualityReport,
    RangeReport,
    Settings,
)
from fp8kv_jax.drift.workload import (
    Sample,
    Tally,
    encode_sample,
    read_samples,
    scan,
)
from fp8kv_jax.drift.workload_draw import Draw
from fp8kv_jax.drift.workload_slices import SliceTable, make_slices
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.manifest import Manifest
from fp8kv_jax.scales.scale_set import ScaleSet

if TYPE_CHECKING:
    from models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Request:
    """A command line, checked as far as that goes without a model."""

    workload: Path
    policy: Policy
    scales: ScaleSet
    manifest: Manifest
    model: Path | None
    dtype: options.ComputeDtype | None
    high_precision_layers: tuple[int, ...]
    allow_mismatch: str | None
    max_prompt_tokens: int
    num_generated: int
    max_new_tokens: int
    attribute: flags.Attribute
    attribution_samples: int
    attribution_tokens: int
    formats: tuple[Format, ...]
    tokens_per_step: int
    top_k: int
    small_margin: float
    seed: int
    page_size: int

    def __post_init__(self) -> None:
        options.check_least(
            1,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            attribution_samples=self.attribution_samples,
            attribution_tokens=self.attribution_tokens,
        )
        options.check_least(0, generate=self.num_generated)

    def settings(self, dtype: options.ComputeDtype, max_tokens: int, **sizes: int):
        """The settings that the result records."""
        return Settings(
            dtype=dtype.value,
            platform=jax.default_backend(),
            page_size=self.page_size,
            tokens_per_step=self.tokens_per_step,
            high_precision_layers=self.high_precision_layers,
            top_k=self.top_k,
            small_margin=self.small_margin,
            max_prompt_tokens=max_tokens,
            num_generated_prompts=sizes.get("num_generated", 0),
            max_new_tokens=self.max_new_tokens,
            attribution_samples=sizes.get("num_attributed", 0),
            attribution_tokens=self.attribution_tokens,
            seed=self.seed,
        )


@dataclass(kw_only=True)
class Parts:
    """What the parts of a replay found."""

    range_report: RangeReport
    tally: Tally
    cache: CacheConfig
    settings: Settings
    model_name: str
    identity: ModelIdentity | None = None
    allowed: tuple[str, ...] = ()
    quality: QualityReport | None = None
    generated: GeneratedReport | None = None
    attributor: Attributor | None = None
    formats: FormatReport | None = None


class TextReplay:
    """The phases of a replay with a model, one after the other."""

    def __init__(
        self, request: Request, model: "LoadedModel", dtype: options.ComputeDtype
    ) -> None:
        config = model.config
        self.request = request
        self.model = model
        self.dtype = dtype
        self.wide = "float32" if dtype == "float32" else "bf16"
        uncovered = uncovered_layers(request.scales, config.num_layers)
        room = request.max_new_tokens if request.num_generated else 0
        longest = min(request.max_prompt_tokens, config.max_context - room)
        if longest < 1:
            raise UserError(
                f"Expected --max-new-tokens below {config.max_context}, the model's "
                f"context, got {room}."
            )
        self.max_prompt_tokens = longest
        with checking_input():
            self.cache = CacheConfig(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                num_pages=1,
                page_size=request.page_size,
                high_precision_layers=tuple(
                    sorted({*request.high_precision_layers, *uncovered})
                ),
                high_precision_dtype=self.wide,
            )
        self.encode = make_encoder(model)
        self.prompts: list[GeneratedPrompt] = []
        self.attributor: Attributor | None = None
        self.formats: FormatReport | None = None

    def scan(self) -> None:
        """Reads the workload once: its digest, its slices, what is drawn from it."""
        request = self.request
        with checking_input():
            self.tally = scan(
                request.workload, self.encode, max_tokens=self.max_prompt_tokens
            )
            self._draw()
            room = max((len(p.prompt_ids) for p in self.prompts), default=0)
            room += request.max_new_tokens if self.prompts else 0
            self.config = ReplayConfig(
                cache=self.cache,
                wide_dtype=self.wide,
                max_tokens=max(self.tally.percentile(1), room),
                tokens_per_step=request.tokens_per_step,
                top_k=request.top_k,
                small_margin=request.small_margin,
            )
        self.slices: SliceTable = make_slices(
            self.tally, max_new_tokens=request.max_new_tokens if self.prompts else 0
        )

    def _draw(self) -> None:
        """Draws the prompts to continue, and the samples to trace a loss on."""
        request = self.request
        prompts = Draw[Sample](request.num_generated, seed=request.seed)
        wanted = request.attribute != "none" or request.formats
        traced = request.attribution_samples if wanted else 0
        losses = Draw[Sample](traced, seed=request.seed + 1)
        for sample in read_samples(request.workload):
            where = {"key": str(sample.line), "data_class": sample.data_class}
            prompts.offer(sample, **where, first=bool(sample.expected))
            losses.offer(sample, **where)
        for sample in prompts.items():
            ids = encode_sample(sample, self.encode, request.workload, answer=True)
            ids = ids[: self.max_prompt_tokens]
            self.prompts.append(GeneratedPrompt(sample=sample, prompt_ids=ids))
        self.traced = [
            encode_sample(sample, self.encode, request.workload)[
                : min(request.attribution_tokens, self.max_prompt_tokens)
            ]
            for sample in losses.items()
        ]

    def generate(self, screen: ReplayScreen) -> None:
        steps = generate_both(
            self.model.forward,
            self.model.params,
            self.prompts,
            cache=self.cache,
            wide_dtype=self.wide,
            scales=self.request.scales,
            max_new_tokens=self.request.max_new_tokens,
            eos_ids=self.model.tokenizer.eos_ids,
        )
        total = 2 * len(self.prompts) * self.request.max_new_tokens
        screen.watch("generating", steps, total=total, unit="tokens at most")

    def score(self, screen: ReplayScreen) -> None:
        self.scored = Replay(
            self.model.forward,
            self.model.params,
            self.request.scales,
            self.config,
            self.slices,
            decode=self.decode,
        )
        generated = sum(len(p.full_ids) for p in self.prompts)
        total = self.tally.num_tokens + generated
        steps = self.scored.run(self._sequences())
        with checking_input():
            screen.watch("scoring", steps, total=total, unit="tokens")

    def _sequences(self) -> Iterator[ReplaySequence]:
        """The workload, with the outputs of the full-precision run where there are."""
        continued = {prompt.sample.line: prompt for prompt in self.prompts}
        for sample in read_samples(self.request.workload):
            prompt = continued.get(sample.line)
            if prompt is None:
                ids = encode_sample(sample, self.encode, self.request.workload)
                ids = ids[: self.max_prompt_tokens]
                length = len(ids)
            else:
                ids, length = (
                    prompt.prompt_ids + prompt.full_ids,
                    len(prompt.prompt_ids),
                )
            yield ReplaySequence(
                name=sample.name,
                token_ids=ids,
                prompt_length=length,
                data_class=sample.data_class,
                language=sample.language,
            )

    def attribute(self, screen: ReplayScreen) -> None:
        """Traces the loss on a sample, and tries other formats on it."""
        if not self.traced:
            return
        sample = LossSample(
            self.model.forward,
            self.model.params,
            self.traced,
            cache=self.cache,
            wide_dtype=self.wide,
            scales=self.request.scales,
            tokens_per_step=self.request.tokens_per_step,
        )
        if self.request.attribute != "none":
            self._attribute(sample, screen)
        if self.request.formats:
            trials = FormatTrials(
                sample, self.request.formats, live_amax=self.live_amax
            )
            total = trials.num_passes
            screen.watch("trying formats", trials.run(), total=total, unit="passes")
            self.formats = trials.report

    def _attribute(self, sample: LossSample, screen: ReplayScreen) -> None:
        self.attributor = Attributor(
            sample,
            live_amax=self.live_amax,
            saturated_share=self.scored.ranges.saturated_share,
            max_kl=self.request.policy.thresholds.max_kl_mean,
            by_head=self.request.attribute == "heads",
        )
        total = self.attributor.num_passes
        screen.watch("attributing", self.attributor.run(), total=total, unit="passes")

    @property
    def live_amax(self) -> Scales:
        return self.scored.ranges.amax[:, :, 0]

    def decode(self, ids) -> str:
        return self.model.tokenizer.decode(ids, skip_special_tokens=False)

    def parts(self, identity: ModelIdentity, allowed: tuple[str, ...]) -> Parts:
        request = self.request
        return Parts(
            range_report=self.scored.range_report(),
            tally=self.tally,
            cache=self.cache,
            settings=request.settings(
                self.dtype,
                self.max_prompt_tokens,
                num_generated=len(self.prompts),
                num_attributed=len(self.traced),
            ),
            model_name=_model_name(request.model),
            identity=identity,
            allowed=allowed,
            quality=self.scored.quality_report(),
            generated=report_generated(self.prompts, self.decode),
            attributor=self.attributor,
            formats=self.formats,
        )


def uncovered_layers(scales: ScaleSet, num_layers: int) -> tuple[int, ...]:
    return tuple(i for i in range(num_layers) if i not in scales.layers)


def _model_name(path: Path | None) -> str:
    return "the demo model" if path is None else path.name
