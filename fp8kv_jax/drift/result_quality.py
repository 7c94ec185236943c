"""Records of a replay: quality of what the model says, teacher-forced and generated."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fp8kv_jax.drift.result_range import Amounts, Slice
from fp8kv_jax.scales.fields import Checked, Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Misranking(Checked):
    """Order changes between neighbours among the full-precision top k.

    Attributes:
      num_pairs: neighbours compared, k - 1 a token.
      flips: share of pairs that FP8 puts the other way round.
      weighted: the same, each pair weighted by its gap in full precision.
      close_flips: share of the flips whose gap was at most `Settings.small_margin`:
        near 1 means that only near-ties changed places. None without a flip.
    """

    num_pairs: Count
    flips: float
    weighted: float
    close_flips: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QualitySlice(Checked):
    """Teacher-forced quality of a slice: both runs read the same tokens.

    Attributes:
      kl_mean, kl_max: KL(full || FP8) of the next-token distributions, in nats.
      kl_p50, kl_p99: percentiles, to within 6 %.
      top1_agreement: share of tokens with the same likeliest next token.
      perplexity_full, perplexity_fp8: of the tokens that follow; None without any.
      attention_error: norm of the error of the attention output over the norm of the
        output, by layer: FP8 run against full-precision run, errors of earlier layers
        included.
    """

    slice: Slice
    kl_mean: float
    kl_p50: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity_full: float | None
    perplexity_fp8: float | None
    misranking: Misranking
    attention_error: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionCurve(Checked):
    """KL as a function of position, and whether it grows.

    Attributes:
      axis: "context" (position in the sequence) or "generated" (tokens since the
        prompt's end, over the full-precision continuation).
      edges: bin i holds positions from edges[i] to edges[i + 1] - 1.
      num_tokens, kl_mean, top1_agreement: by bin; None for an empty bin.
      slope: of the KL's mean, in nats per 1,000 tokens, by least squares; None if
        there are too few positions.
      slope_error: its standard error.
      accumulates: the slope is beyond 3 standard errors above zero, and the growth
        over the range is at least a fifth of the mean.
    """

    axis: Literal["context", "generated"]
    edges: tuple[int, ...]
    num_tokens: tuple[int, ...]
    kl_mean: tuple[float | None, ...]
    top1_agreement: tuple[float | None, ...]
    slope: float | None
    slope_error: float | None
    accumulates: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken(Checked):
    """A token where the two runs disagree most.

    Attributes:
      sample: the sample's id, or its line.
      position: of the token that was read last.
      kl: KL(full || FP8) of what comes next.
      context: the text up to there, cut in front.
      next_token: what follows in the text, "" at its end.
      full_top, fp8_top: the likeliest next token of each run, and its probability;
        with its id where it holds a part of a character alone.
    """

    sample: str
    data_class: str
    language: str
    position: Count
    kl: float
    context: str
    next_token: str
    full_top: str
    full_probability: float
    fp8_top: str
    fp8_probability: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QualityReport(Checked):
    """Teacher-forced quality, overall (first) and by slice.

    `attention_error` is `[layer][head]` over all layers and KV heads, overall.
    """

    slices: tuple[QualitySlice, ...]
    attention_error: Amounts
    curves: tuple[PositionCurve, ...]
    worst_tokens: tuple[WorstToken, ...]

    @property
    def overall(self) -> QualitySlice:
        return self.slices[0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedSlice(Checked):
    """Greedy output of both runs, for all prompts or those of one class.

    Attributes:
      num_prompts: prompts continued by both.
      exact_match: share whose outputs are equal to the last token.
      first_divergence_p50: median of the first differing token's index, among those
        that differ; None if none does. `first_divergence_min` likewise.
      agreement: share of output tokens before the first difference.
      num_with_answer: prompts with an expected answer.
      accuracy_full, accuracy_fp8: share of them that is right; None without answers.
    """

    name: str
    num_prompts: Count
    exact_match: float
    first_divergence_p50: int | None
    first_divergence_min: int | None
    agreement: float
    num_with_answer: Count
    accuracy_full: float | None
    accuracy_fp8: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedExample(Checked):
    """One prompt's outputs; `first_divergence` is None where they are equal."""

    sample: str
    data_class: str
    prompt: str
    full_text: str
    fp8_text: str
    num_tokens: Count
    first_divergence: int | None
    expected: tuple[str, ...]
    full_correct: bool | None
    fp8_correct: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedReport(Checked):
    """Quality of generated text: all prompts (first), then by class; some examples."""

    slices: tuple[GeneratedSlice, ...]
    examples: tuple[GeneratedExample, ...]

    @property
    def overall(self) -> GeneratedSlice:
        return self.slices[0]


def alike(tokens: Sequence[WorstToken]) -> list[tuple[WorstToken, int]]:
    """Tokens in order, with how many more there are of the same text.

    Chats share the words of their template: one bad token of it comes with each.
    """
    more: dict[tuple[str, ...], tuple[WorstToken, int]] = {}
    for token in tokens:
        key = (token.context, token.next_token, token.full_top, token.fp8_top)
        first, number = more.get(key, (token, -1))
        more[key] = (first, number + 1)
    return list(more.values())
