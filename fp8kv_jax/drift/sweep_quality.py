"""What scales cost in quality: next-token distributions against full precision.

Each scale set takes a forward pass, so only a few settings of a sweep are measured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from fp8kv_jax.batch import Batch
from fp8kv_jax.cache import CacheConfig, init_cache
from fp8kv_jax.calibration import CalibrationConfig, init_calibration
from fp8kv_jax.decode import Forward, StepFunction, make_steps
from fp8kv_jax.drift.quality import compare_logits
from fp8kv_jax.drift.sweep import Outcome
from fp8kv_jax.drift.trace import Trace, TraceShape
from fp8kv_jax.scales.sample_plan import allot
from fp8kv_jax.scales.scale_set import ScaleSet

MAX_MEASURED = 8
# The only format that a cache holds.
_CACHE_FORMAT = "fp8_e4m3"
# Tokens of a step: bounds the logits in memory.
_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Teacher-forced quality over some tokens.

    Attributes:
      num_tokens: tokens whose next-token distributions were compared.
      kl: mean KL(full precision || FP8), in nats.
      top1: share of tokens with the same likeliest next token.
      kl_error, top1_error: standard errors of both, as if tokens were independent.
    """

    num_tokens: int
    kl: float
    top1: float
    kl_error: float
    top1_error: float


@dataclass(frozen=True, kw_only=True)
class EvaluationText:
    """Token ids of a text, and the class they are of."""

    data_class: str
    token_ids: Int32[np.ndarray, "num_tokens"]


def choose(outcomes: Sequence[Outcome], limit: int = MAX_MEASURED) -> list[int]:
    """Says which outcomes to measure: at most `limit` different scale sets.

    Outcomes that differ in their window alone are a line. Line by line, in the order
    of the grid, the smallest window is taken, then line by line the largest, then the
    one that halves the widest gap between windows taken, until `limit` scale sets
    are. Scale sets that were never frozen are no answer and left out.
    """
    lines: dict[Any, list[int]] = {}
    for index, outcome in enumerate(outcomes):
        format_fits = outcome.setting.number_format == _CACHE_FORMAT
        if format_fits and outcome.frozen_at is not None:
            line = replace(outcome.setting, window=1)
            lines.setdefault(line, []).append(index)
    queues = [_spread(line, outcomes) for line in lines.values()]
    taken: dict[bytes, int] = {}
    while queues and len(taken) < limit:
        for queue in list(queues):
            if not queue:
                queues.remove(queue)
            elif len(taken) < limit:
                index = queue.pop(0)
                taken.setdefault(scales_key(outcomes[index]), index)
    return sorted(taken.values())


def scales_key(outcome: Outcome) -> bytes:
    """Equal for outcomes that write the same bytes."""
    sizes = f"{outcome.setting.number_format} {outcome.scales.shape} "
    return sizes.encode() + outcome.scales.tobytes()


def _spread(line: Sequence[int], outcomes: Sequence[Outcome]) -> list[int]:
    """Orders a line: extremes first, then whatever halves the widest gap (of ratios)."""
    left = sorted(line, key=lambda i: outcomes[i].setting.window)
    taken = [left.pop(0)]
    if left:
        taken.append(left.pop())

    def distance(index: int) -> float:
        window = outcomes[index].setting.window
        return min(abs(np.log(window / outcomes[i].setting.window)) for i in taken)

    while left:
        best = max(left, key=distance)
        left.remove(best)
        taken.append(best)
    return taken


def pick_texts(
    trace: Trace, classes: Sequence[str], num_tokens: int
) -> list[EvaluationText]:
    """Takes about equally many tokens of each class, from the beginnings of texts.

    Raises:
      TraceError: if the trace has no token ids.
    """
    by_class = {
        name: [t for t in trace.texts if t.data_class == name] for name in classes
    }
    available = [sum(t.num_tokens for t in texts) for texts in by_class.values()]
    quotas = allot(num_tokens, available)
    picked = []
    for (name, texts), quota in zip(by_class.items(), quotas, strict=True):
        for text in texts:
            ids = trace.token_ids(text.name)[:quota]
            quota -= len(ids)
            if ids.size:
                picked.append(EvaluationText(data_class=name, token_ids=ids))
    return picked


def scale_set_of(outcome: Outcome) -> ScaleSet:
    """The scales of an outcome, as a step takes them."""
    k, v = outcome.scales
    by_layer = {layer: (k[layer], v[layer]) for layer in range(len(k))}
    return ScaleSet.from_scales(by_layer, granularity=outcome.setting.granularity)


def measure(
    forward: Forward,
    params: Any,
    texts: Sequence[EvaluationText],
    scale_sets: Sequence[ScaleSet],
    *,
    shape: TraceShape,
    reference_dtype: str,
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Quality]]:
    """Runs texts through caches of the given scales and one of full precision.

    All read the same tokens. No logits outlive the chunk of tokens they are of.

    Args:
      forward: the model.
      params: its parameters.
      texts: what to run.
      scale_sets: static scales of all layers.
      shape: layers, KV heads and head size of the model.
      reference_dtype: what the cache of full precision holds, "float32" or "bf16".
      advance: told how many tokens were compared.

    Returns:
      For each scale set, quality by class of text, and over all under `all`.
    """
    step = jax.jit(make_steps(forward).score_step, donate_argnums=(1, 2))
    longest = max(len(text.token_ids) for text in texts)
    config = CacheConfig(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_pages=-(-longest // _CHUNK),
        page_size=_CHUNK,
    )
    reference = _Runner(step, params, replace(config, dtype=reference_dtype), None)
    runners = [_Runner(step, params, config, scales) for scales in scale_sets]
    sums = [{text.data_class: np.zeros(4) for text in texts} for _ in scale_sets]
    for text in texts:
        for batch, real in _batches(text.token_ids, config.num_pages):
            expected = reference(batch)
            for runner, by_class in zip(runners, sums, strict=True):
                compared = _compare(expected, runner(batch), real)
                by_class[text.data_class] += np.asarray(compared, np.float64)
            advance(int(real.sum()))
    return [_qualities(by_class) for by_class in sums]


def _qualities(by_class: dict[str, np.ndarray]) -> dict[str, Quality]:
    by_class = {**by_class, "all": sum(by_class.values(), start=np.zeros(4))}
    found = {}
    for name, sums in by_class.items():
        count, total_kl, squared_kl, agreed = map(float, sums)
        kl, top1 = total_kl / count, agreed / count
        found[name] = Quality(
            num_tokens=int(count),
            kl=kl,
            top1=top1,
            kl_error=max(0.0, (squared_kl / count - kl**2) / count) ** 0.5,
            top1_error=(top1 * (1 - top1) / count) ** 0.5,
        )
    return found


class _Runner:
    """A cache and its state between steps."""

    def __init__(
        self,
        step: StepFunction,
        params: Any,
        config: CacheConfig,
        scales: ScaleSet | None,
    ) -> None:
        self._step, self._params = step, params
        self._cache = init_cache(config)
        self._state = init_calibration(
            CalibrationConfig(window_tokens=0 if config.fp8_layers else 1),
            config,
            max_tokens_per_step=_CHUNK,
            scales=scales,
        )

    def __call__(self, batch: Batch) -> Float[Array, "num_queries vocab_size"]:
        logits, self._cache, self._state = self._step(
            self._params, self._cache, self._state, batch
        )
        return logits[0]


def _batches(
    token_ids: Int32[np.ndarray, "num_tokens"], num_pages: int
) -> Iterator[tuple[Batch, Bool[np.ndarray, "num_queries"]]]:
    """Cuts a text into steps over the pages 0, 1, ...: earlier texts are overwritten."""
    for start in range(0, len(token_ids), _CHUNK):
        ids = token_ids[start : start + _CHUNK]
        real = np.arange(_CHUNK) < len(ids)
        padded = np.zeros(_CHUNK, np.int32)
        padded[: len(ids)] = ids
        slots = np.where(real, start + np.arange(_CHUNK), -1).astype(np.int32)
        batch = Batch(
            token_ids=jnp.asarray(padded)[None],
            slot_mapping=jnp.asarray(slots)[None],
            query_starts=jnp.array([start], jnp.int32),
            seq_lens=jnp.array([start + len(ids)], jnp.int32),
            block_table=jnp.arange(num_pages, dtype=jnp.int32)[None],
        )
        yield batch, real


@jax.jit
def _compare(
    expected: Float[Array, "num_queries vocab_size"],
    got: Float[Array, "num_queries vocab_size"],
    real: Bool[Array, "num_queries"],
) -> Float[Array, "4"]:
    """Sums over real tokens: how many, KL, its square, whose likeliest token agrees."""
    labels = jnp.zeros(len(expected), jnp.int32)
    tokens = compare_logits(expected, got, labels, top_k=2, small_margin=0.0)
    agreed = (tokens.full_top == tokens.fp8_top).astype(jnp.float32)
    rows = jnp.stack([jnp.ones_like(agreed), tokens.kl, tokens.kl**2, agreed])
    return jnp.where(real[None], rows, 0.0).sum(axis=1)
