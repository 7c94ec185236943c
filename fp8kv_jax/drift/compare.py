"""Two artifacts on the same prompts: quality against full precision, token by token."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float64, Int32

from fp8kv_jax.attention import attend, begin_step, end_step
from fp8kv_jax.batch import Batch
from fp8kv_jax.block_table import BlockTable, make_batch
from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.compare_result import Bounds, Measure, Perplexities, judge
from fp8kv_jax.drift.compare_statistics import paired_bootstrap
from fp8kv_jax.drift.quality import TokenQuality, compare_logits
from fp8kv_jax.drift.replay_step import Lane, make_lane
from fp8kv_jax.scales.scale_set import ScaleSet
from pallas_kernels.dispatch import Implementation

# Tokens of a sequence in one step, and contexts that lanes are made for.
_STEP_WIDTH = 64
_SHORTEST_CONTEXT, _CONTEXT_GROWTH = 256, 8
# What is summed up of each prompt, by column.
COLUMNS = (
    *("tokens", "kl_a", "kl_b", "top1_a", "top1_b"),
    *("labels", "nll_full", "nll_a", "nll_b"),
)
_AT = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An artifact's scales, and the cache that it gets; `num_pages` does not matter."""

    scales: ScaleSet
    cache: CacheConfig


class PairedQuality:
    """Scores prompts in full precision once, and with the scales of A and B.

    Args:
      forward: the model.
      params: its parameters.
      a: one artifact.
      b: the other one.
      wide_dtype: "bf16" or "float32", what the full-precision cache holds.
      max_tokens: longest prompt.
      tokens_per_step: tokens that go through the model at once.
      implementation: which kernels to use; None for the best that works.

    Attributes:
      rows: sums of the prompts scored so far, `COLUMNS` of each.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        a: Candidate,
        b: Candidate,
        *,
        wide_dtype: str,
        max_tokens: int,
        tokens_per_step: int = 512,
        implementation: Implementation | None = None,
    ) -> None:
        self.rows: list[np.ndarray] = []
        self._params = params
        self._candidates = (a, b)
        self._wide_dtype = wide_dtype
        self._max_tokens = max_tokens
        self._width = min(_STEP_WIDTH, max_tokens)
        self._num_seqs = max(1, tokens_per_step // self._width)
        self._step = _make_step(forward, implementation)
        self._lanes: dict[int, tuple[Lane, Lane, Lane]] = {}

    def run(self, prompts: Sequence[Sequence[int]]) -> Iterator[int]:
        """Scores prompts; yields the number of tokens scored after each step.

        Raises:
          ValueError: if a run's logits are not finite.
        """
        num_tokens = 0
        for start in range(0, len(prompts), self._num_seqs):
            group = prompts[start : start + self._num_seqs]
            sums = np.zeros((len(group), len(COLUMNS)))
            for scored in self._run_group(group, sums):
                num_tokens += scored
                yield num_tokens
            self.rows += list(sums)

    def _run_group(
        self, group: Sequence[Sequence[int]], sums: Float64[np.ndarray, "seqs columns"]
    ) -> Iterator[int]:
        """Runs some prompts side by side from start to end."""
        longest, width = max(map(len, group)), self._width
        context = _SHORTEST_CONTEXT
        while context < longest:
            context *= _CONTEXT_GROWTH
        context = min(context, self._max_tokens)
        lanes = self._lanes.pop(context, None) or self._make_lanes(context)
        table = self._make_table(context)
        for start in range(0, longest, width):
            ids = {i: p[start : start + width] for i, p in enumerate(group)}
            ids = {i: stretch for i, stretch in ids.items() if len(stretch)}
            batch = make_batch(
                table,
                ids,
                dict.fromkeys(ids, start),
                num_queries=width,
                num_seqs=self._num_seqs,
            )
            labels = np.full((self._num_seqs, width), -1, np.int32)
            for place, i in enumerate(ids):
                following = group[i][start + 1 : start + width + 1]
                labels[place, : len(following)] = following
            lanes, pair = self._step(
                self._params, lanes, batch, jnp.asarray(labels.reshape(-1))
            )
            pair = jax.device_get(pair)
            for place, (i, stretch) in enumerate(ids.items()):
                rows = slice(place * width, place * width + len(stretch))
                sums[i] += _sum_up(pair, rows, labels[place, : len(stretch)] >= 0)
            yield sum(map(len, ids.values()))
        self._lanes[context] = lanes

    def _num_pages(self, context: int) -> int:
        return self._num_seqs * -(-context // self._candidates[0].cache.page_size)

    def _make_table(self, context: int) -> BlockTable:
        return BlockTable(
            num_pages=self._num_pages(context),
            page_size=self._candidates[0].cache.page_size,
            num_seqs=self._num_seqs,
            max_seq_len=context,
        )

    def _make_lanes(self, context: int) -> tuple[Lane, Lane, Lane]:
        num_pages = self._num_pages(context)
        a, b = self._candidates
        wide = replace(a.cache, dtype=self._wide_dtype, num_pages=num_pages)
        first, second = (
            make_lane(replace(x.cache, num_pages=num_pages), x.scales) for x in (a, b)
        )
        return make_lane(wide, None), first, second


@functools.lru_cache(maxsize=8)  # several comparisons on one model compile once
def _make_step(
    forward: Forward, implementation: Implementation | None
) -> Callable[..., tuple[tuple[Lane, Lane, Lane], tuple[TokenQuality, TokenQuality]]]:
    """Makes the jitted step of all three runs; it donates their lanes."""

    def run_one(params, lane, batch):
        def attend_to(step, layer, q, k, v, **options):
            return attend(
                step, layer, q, k, v, **options, implementation=implementation
            )

        step = begin_step(
            lane.cache, lane.calibration, batch, implementation=implementation
        )
        logits, step = forward(
            params, batch.token_ids, batch.positions, attend_to, step
        )
        cache, calibration = end_step(step, implementation=implementation)
        lane = Lane(cache=cache, calibration=calibration)
        return logits.reshape(-1, logits.shape[-1]), lane

    def run(
        params: Any,
        lanes: tuple[Lane, Lane, Lane],
        batch: Batch,
        labels: Int32[Array, "num_tokens"],
    ):
        full, wide = run_one(params, lanes[0], batch)
        (a, lane_a), (b, lane_b) = (run_one(params, x, batch) for x in lanes[1:])
        labels = jnp.maximum(labels, 0)
        # The order of the likeliest tokens is not looked at: 2 is the least.
        pair = tuple(
            compare_logits(full, x, labels, top_k=2, small_margin=0.0) for x in (a, b)
        )
        return (wide, lane_a, lane_b), pair

    return jax.jit(run, donate_argnums=1)


def _sum_up(
    pair: tuple[TokenQuality, TokenQuality], rows: slice, has_label: np.ndarray
) -> Float64[np.ndarray, "columns"]:
    """Sums of one prompt's tokens of a step."""

    def add(values: ArrayLike) -> float:
        return float(np.sum(np.asarray(values)[rows], dtype=np.float64))

    def add_labelled(values: ArrayLike) -> float:
        return float(np.sum(np.asarray(values)[rows][has_label], dtype=np.float64))

    a, b = pair
    kl = (add(a.kl), add(b.kl))
    if not np.isfinite(kl).all():
        raise ValueError(
            "Expected finite logits, got NaN or Inf: the model fails on a prompt, in "
            "full precision or in FP8."
        )
    top1 = (add(x.full_top == x.fp8_top) for x in pair)
    nll = (add_labelled(x) for x in (a.full_nll, a.fp8_nll, b.fp8_nll))
    return np.array([rows.stop - rows.start, *kl, *top1, has_label.sum(), *nll])


def judge_quality(
    rows: Float64[np.ndarray, "num_prompts columns"],
    bounds: Bounds,
    *,
    draws: int,
    seed: int,
) -> list[Measure]:
    """Compares mean KL, top-1 agreement and what becomes of the perplexity."""

    def mean(name: str):
        def both(sums: Float64[np.ndarray, "*draws columns"]) -> tuple:
            tokens = sums[..., _AT["tokens"]]
            return tuple(sums[..., _AT[f"{name}_{x}"]] / tokens for x in "ab")

        return both

    def drift(sums: Float64[np.ndarray, "*draws columns"]) -> tuple:
        # By FP8, perplexity may fall as well as rise: both are drift.
        full, a, b = (sums[..., _AT[f"nll_{x}"]] for x in ("full", "a", "b"))
        labels = sums[..., _AT["labels"]]
        return tuple(abs(np.expm1((x - full) / labels)) for x in (a, b))

    bootstrap = functools.partial(paired_bootstrap, draws=draws, seed=seed)
    measures = [
        judge(
            bootstrap(rows, mean("kl"), change="difference"),
            name="kl_mean",
            unit="nats",
            change_kind="difference",
            bound=bounds.kl,
        ),
        judge(
            bootstrap(rows, mean("top1"), change="difference"),
            name="top1_agreement",
            unit="share",
            change_kind="difference",
            bound=bounds.top1,
            higher_is_better=True,
        ),
    ]
    labelled = rows[rows[:, _AT["labels"]] > 0]
    if len(labelled):
        measures.append(
            judge(
                bootstrap(labelled, drift, change="difference"),
                name="perplexity_drift",
                unit="share",
                change_kind="difference",
                bound=bounds.perplexity,
            )
        )
    return measures


def perplexities(
    rows: Float64[np.ndarray, "num_prompts columns"],
) -> Perplexities | None:
    """Perplexity of all three runs; None if no token follows another."""
    sums = dict(zip(COLUMNS, rows.sum(axis=0), strict=True))
    if not sums["labels"]:
        return None
    full, a, b = (
        float(np.exp(sums[f"nll_{x}"] / sums["labels"])) for x in ("full", "a", "b")
    )
    return Perplexities(full=full, a=a, b=b)
