"""Which layers and heads explain a loss: FP8 in one at a time, on a small sample."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp8kv_jax.calibration import scale_of, scale_per_amax
from fp8kv_jax.drift.loss_sample import (
    Local,
    LossSample,
    Scales,
    Trial,
    relative_error,
)
from fp8kv_jax.drift.result_loss import (
    Attribution,
    HighPrecisionTrial,
    LayerLoss,
    ScaleTrial,
    TwoDrifts,
)
from fp8kv_jax.scales.statistics import NO_SIGNAL_SCALE

# Sets of the costliest layers that are tried wide; never more than a quarter of them.
_SET_SIZES = (1, 2, 4, 8, 16)
# Layers whose heads are looked at one by one.
_NUM_LAYERS_BY_HEAD = 3
# The scales of a layer's keys and values, and their reciprocals, in float32.
_BYTES_PER_GROUP = 2 * 2 * 4


def fitted_scales(amax: Scales) -> tuple[Scales, Scales]:
    """Scales made from live amax without headroom: one a head, and one a layer."""

    def make(amax: np.ndarray) -> np.ndarray:
        scale = scale_of(amax, scale_per_amax(1.0))
        return np.where(amax > 0, scale, NO_SIGNAL_SCALE).astype(np.float32)

    shared = np.broadcast_to(amax.max(axis=2, keepdims=True), amax.shape)
    return make(amax), make(shared)


class Attributor:
    """Finds where the loss comes from, in two rounds over a sample.

    Args:
      sample: what to run.
      live_amax: of the whole workload, `[2, fp8_layers, num_kv_heads]`.
      saturated_share: of the whole workload.
      max_kl: what the policy allows; None for no bound.
      by_head: also look at single heads of the costliest layers.

    Attributes:
      attribution, drifts: the findings, once `run` is exhausted.
    """

    def __init__(
        self,
        sample: LossSample,
        *,
        live_amax: Scales,
        saturated_share: float,
        max_kl: float | None,
        by_head: bool = False,
    ) -> None:
        self.attribution: Attribution | None = None
        self.drifts: TwoDrifts | None = None
        self._sample = sample
        self._max_kl = max_kl
        self._by_head = by_head
        self._saturated_share = saturated_share
        self._saved = sample.saved.scale
        self._all = np.ones(self._saved.shape[1:], bool)
        head, tensor = fitted_scales(live_amax)
        self._scales = {
            "saved": self._saved,
            "live_head": head,
            "live_tensor": tensor,
        }

    @property
    def num_passes(self) -> int:
        """Forward passes that all of it takes."""
        num_layers, num_heads = self._all.shape
        second = len(self._set_sizes())
        if self._by_head:
            second += min(num_layers, _NUM_LAYERS_BY_HEAD) * num_heads
        first = self._sample.passes(num_layers + len(self._scales), len(self._scales))
        return first + (self._sample.passes(second, 0) if second else 0)

    def run(self) -> Iterator[int]:
        """Yields the number of forward passes so far, after each."""
        wholes = {
            name: Trial(mask=self._all, scales=x) for name, x in self._scales.items()
        }
        locals_ = {name: Local(scales=x) for name, x in self._scales.items()}
        num_layers = len(self._all)
        alone = [self._trial(layer) for layer in range(num_layers)]
        yield from self._sample.run([*wholes.values(), *alone], [*locals_.values()])
        order = sorted(range(num_layers), key=lambda row: -alone[row].kl)
        sets = {tuple(sorted(order[:n])): None for n in self._set_sizes()}
        kept = {rows: self._trial(*rows, inverted=True) for rows in sets}
        costly = order[:_NUM_LAYERS_BY_HEAD] if self._by_head else []
        heads = {
            row: [self._trial(row, head=h) for h in range(self._all.shape[1])]
            for row in costly
        }
        single = [trial for trials in heads.values() for trial in trials]
        if kept or single:
            yield from self._sample.run([*kept.values(), *single], [])
        scales = tuple(
            self._scale_trial(name, wholes[name], locals_[name]) for name in wholes
        )
        self.drifts = self._two_drifts(wholes)
        self._conclude(wholes["saved"], alone, kept, heads, scales)

    def _set_sizes(self) -> list[int]:
        return [n for n in _SET_SIZES if n <= max(1, len(self._all) // 4)]

    def _trial(
        self, *rows: int, head: int | None = None, inverted: bool = False
    ) -> Trial:
        mask = np.zeros_like(self._all)
        mask[list(rows), slice(None) if head is None else head] = True
        return Trial(mask=~mask if inverted else mask, scales=self._saved)

    def _scale_trial(self, name: Any, whole: Trial, local: Local) -> ScaleTrial:
        sample = self._sample
        num_values = 2 * self._all.size * sample.cache.head_dim * sample.num_tokens
        per_head = name == "live_head" or (name == "saved" and sample.saved.per_head)
        num_groups = self._all.size if per_head else len(self._all)
        return ScaleTrial(
            name=name,
            kl_mean=whole.kl_mean,
            top1_agreement=whole.top1_agreement,
            local_attention_error=relative_error(local.error, local.norm),
            saturated_share=local.num_saturated / num_values,
            scale_bytes=num_groups * _BYTES_PER_GROUP,
        )

    def _two_drifts(self, wholes: dict[str, Trial]) -> TwoDrifts:
        per_head = self._sample.saved.per_head
        fitted = wholes["live_head" if per_head else "live_tensor"].kl_mean
        saved = wholes["saved"].kl_mean
        gain = saved - fitted
        share = self._saturated_share
        return TwoDrifts(
            saturated_share=share,
            kl_saved=saved,
            kl_fitted=fitted,
            kl_from_scales=gain,
            words=describe_drifts(share, saved, fitted),
        )

    def _conclude(
        self,
        whole: Trial,
        alone: Sequence[Trial],
        kept: dict[tuple[int, ...], Trial],
        heads: dict[int, list[Trial]],
        scales: tuple[ScaleTrial, ...],
    ) -> None:
        layers = self._sample.saved.layers
        total = sum(trial.kl_mean for trial in alone) or 1.0
        losses = [
            LayerLoss(
                layer=layers[row],
                kl_mean=trial.kl_mean,
                share=trial.kl_mean / total,
                top1_agreement=trial.top1_agreement,
                head_kl=tuple(x.kl_mean for x in heads[row]) if row in heads else None,
            )
            for row, trial in enumerate(alone)
        ]
        trials = [
            self._high_precision(tuple(layers[row] for row in rows), trial)
            for rows, trial in kept.items()
        ]
        recommended, words = recommend(whole.kl_mean, trials, self._max_kl)
        self.attribution = Attribution(
            num_samples=self._sample.num_samples,
            num_tokens=self._sample.num_tokens,
            kl_mean=whole.kl_mean,
            top1_agreement=whole.top1_agreement,
            layers=tuple(losses),
            trials=tuple(trials),
            recommended=recommended,
            recommendation=words,
            scales=scales,
        )

    def _high_precision(
        self, layers: tuple[int, ...], trial: Trial
    ) -> HighPrecisionTrial:
        cache = replace(self._sample.cache, high_precision_dtype="bf16")
        both = tuple(sorted({*cache.high_precision_layers, *layers}))
        wider = replace(cache, high_precision_layers=both)
        return HighPrecisionTrial(
            layers=layers,
            kl_mean=trial.kl_mean,
            top1_agreement=trial.top1_agreement,
            bytes_per_token=wider.bytes_per_token,
            extra_bytes_per_token=wider.bytes_per_token - cache.bytes_per_token,
        )


def describe_drifts(saturated_share: float, saved: float, fitted: float) -> str:
    """Says in words which of the two drifts a loss comes from."""
    left = f"{saturated_share:.3g} of the values leave" if saturated_share else ""
    left = left or "No value leaves"
    start = f"{left} the saved range. The mean KL on the sample is {saved:.3g} nats"
    if fitted >= saved:
        return (
            f"{start}; scales made from this very traffic do no better ({fitted:.3g}): "
            "it is what rounding costs."
        )
    return (
        f"{start}; {fitted:.3g} remains with scales made from this very traffic, which "
        f"is what rounding costs: better scales would win back {saved - fitted:.3g}."
    )


def recommend(
    kl: float, trials: Sequence[HighPrecisionTrial], max_kl: float | None
) -> tuple[tuple[int, ...], str]:
    """Names the smallest measured set that meets a bound, and says what it costs.

    Args:
      kl: mean KL with FP8 in every layer, on the same sample.
      trials: measured sets, the smallest first.
      max_kl: the bound; None for none.
    """
    if max_kl is None:
        return (), "The policy has no bound on the mean KL: nothing is recommended."
    if kl <= max_kl:
        return (), (
            f"FP8 in every layer meets the bound: mean KL {kl:.3g} of {max_kl:.3g}."
        )
    for trial in trials:
        if trial.kl_mean <= max_kl:
            spelled = ",".join(map(str, trial.layers))
            return trial.layers, (
                f"--kv-high-precision-layers {spelled}: mean KL {kl:.3g} -> "
                f"{trial.kl_mean:.3g}, for {trial.extra_bytes_per_token:,} more bytes "
                f"a token ({trial.bytes_per_token:,} in all)."
            )
    best = min((t.kl_mean for t in trials), default=kl)
    return (), (
        f"No set of at most a quarter of the layers meets the bound of {max_kl:.3g}: "
        f"the best has a mean KL of {best:.3g}, all layers in FP8 {kl:.3g}."
    )
