"""Quality of generated text: the greedy outputs of both runs, side by side."""

import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.result_quality import (
    GeneratedExample,
    GeneratedReport,
    GeneratedSlice,
)
from fp8kv_jax.drift.workload import Sample
from fp8kv_jax.generation import GenerationConfig, Generator, Token
from fp8kv_jax.scales.scale_set import ScaleSet
from pallas_kernels.dispatch import Implementation

# Prompts that are continued side by side, and how much of one an example shows.
_PROMPTS_AT_ONCE = 8
_SHOWN_CHARACTERS = 400


@dataclass(kw_only=True)
class GeneratedPrompt:
    """A prompt, and what both runs made of it."""

    sample: Sample
    prompt_ids: list[int]
    full_ids: list[int] = field(default_factory=list)
    fp8_ids: list[int] = field(default_factory=list)

    @property
    def first_divergence(self) -> int | None:
        """Index of the first token that differs; None if none does."""
        shortest = min(len(self.full_ids), len(self.fp8_ids))
        for index in range(shortest):
            if self.full_ids[index] != self.fp8_ids[index]:
                return index
        return None if len(self.full_ids) == len(self.fp8_ids) else shortest


def generate_both(
    forward: Forward,
    params: Any,
    prompts: Sequence[GeneratedPrompt],
    *,
    cache: CacheConfig,
    wide_dtype: str,
    scales: ScaleSet,
    max_new_tokens: int,
    eos_ids: Collection[int],
    implementation: Implementation | None = None,
) -> Iterator[int]:
    """Continues prompts greedily with a wide cache and with FP8, and fills them in.

    Args:
      forward: the model.
      params: its parameters.
      prompts: filled in, in place.
      cache: the FP8 cache; `num_pages` is replaced by what the prompts need.
      wide_dtype: "bf16" or "float32".
      scales: of every FP8 layer.
      max_new_tokens: tokens to generate at most.
      eos_ids: tokens that end an output.
      implementation: which kernels to use; None for the best that works.

    Yields:
      The number of tokens so far, after each.
    """
    if not prompts:
        return
    longest = max(len(p.prompt_ids) for p in prompts) + max_new_tokens
    num_seqs = min(_PROMPTS_AT_ONCE, len(prompts))
    fp8 = replace(cache, num_pages=num_seqs * -(-longest // cache.page_size))
    wide = replace(fp8, dtype=wide_dtype)
    num_tokens = 0
    for name, config, given in (("full_ids", wide, None), ("fp8_ids", fp8, scales)):
        generator = Generator(
            forward,
            params,
            config,
            CalibrationConfig(window_tokens=0),
            num_seqs=num_seqs,
            max_seq_len=longest,
            scales=given,
            prefill_chunks=(128,),
            implementation=implementation,
        )
        for start in range(0, len(prompts), num_seqs):
            group = prompts[start : start + num_seqs]
            for event in generator.generate(
                [p.prompt_ids for p in group],
                GenerationConfig(max_new_tokens=max_new_tokens),
                eos_ids=eos_ids,
            ):
                if isinstance(event, Token):
                    getattr(group[event.sequence], name).append(event.token_id)
                    num_tokens += 1
                    yield num_tokens


def report_generated(
    prompts: Sequence[GeneratedPrompt],
    decode: Callable[[Sequence[int]], str],
    *,
    num_examples: int = 12,
) -> GeneratedReport | None:
    """Sums up: all prompts, then each class; the earliest divergences as examples."""
    if not prompts:
        return None
    graded = [_example(prompt, decode) for prompt in prompts]
    classes = dict.fromkeys(example.data_class for example in graded)
    slices = [_slice("all", graded)]
    slices += [
        _slice(name, [x for x in graded if x.data_class == name]) for name in classes
    ]

    def order(example: GeneratedExample) -> tuple[bool, int]:
        divergence = example.first_divergence
        return divergence is None, divergence or 0

    shown = tuple(sorted(graded, key=order)[:num_examples])
    return GeneratedReport(slices=tuple(slices), examples=shown)


def _example(
    prompt: GeneratedPrompt, decode: Callable[[Sequence[int]], str]
) -> GeneratedExample:
    full, fp8 = decode(prompt.full_ids), decode(prompt.fp8_ids)
    expected = prompt.sample.expected
    return GeneratedExample(
        sample=prompt.sample.name,
        data_class=prompt.sample.data_class,
        prompt=decode(prompt.prompt_ids)[-_SHOWN_CHARACTERS:],
        full_text=full,
        fp8_text=fp8,
        num_tokens=len(prompt.full_ids),
        first_divergence=prompt.first_divergence,
        expected=expected,
        full_correct=has_answer(full, expected) if expected else None,
        fp8_correct=has_answer(fp8, expected) if expected else None,
    )


def has_answer(text: str, expected: Sequence[str]) -> bool:
    """Says whether one of the answers stands in a text, as words of their own.

    Case, width and the kind of white space do not matter.
    """
    padded = f" {_plain(text)} "
    return any(_stands_in(padded, _plain(answer)) for answer in expected)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _stands_in(text: str, answer: str) -> bool:
    """Finds an answer that is no part of a longer word or number."""
    start = text.find(answer)
    while start >= 0:
        before, after = text[start - 1], text[start + len(answer)]
        if not (_joins(before, answer[0]) or _joins(answer[-1], after)):
            return True
        start = text.find(answer, start + 1)
    return False


def _joins(left: str, right: str) -> bool:
    # Scripts without spaces, such as Chinese, have no words to be a part of.
    return left.isalnum() and right.isalnum() and left.isascii() and right.isascii()


def _slice(name: str, graded: Sequence[GeneratedExample]) -> GeneratedSlice:
    divergences = [x.first_divergence for x in graded if x.first_divergence is not None]
    same = [
        x.num_tokens if x.first_divergence is None else x.first_divergence
        for x in graded
    ]
    answered = [x for x in graded if x.full_correct is not None]
    return GeneratedSlice(
        name=name,
        num_prompts=len(graded),
        exact_match=1 - len(divergences) / len(graded),
        first_divergence_p50=int(np.median(divergences)) if divergences else None,
        first_divergence_min=min(divergences, default=None),
        agreement=sum(same) / max(1, sum(x.num_tokens for x in graded)),
        num_with_answer=len(answered),
        accuracy_full=_share([bool(x.full_correct) for x in answered]),
        accuracy_fp8=_share([bool(x.fp8_correct) for x in answered]),
    )


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
