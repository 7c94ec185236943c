"""Records of a replay: where a loss comes from, and what the cache takes."""

import dataclasses
from typing import Literal

from fp8kv_jax.scales.fields import Checked, Count, Positive


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaleTrial(Checked):
    """One set of scales on the attribution's sample.

    Attributes:
      name: "saved" (the artifact's), "live_head" and "live_tensor" (made from this
        workload's amax, without headroom, one a head or one a layer).
      kl_mean, top1_agreement: of the whole model in FP8 with these scales.
      local_attention_error: error of each layer's attention output when its inputs
        are the full-precision run's own: what rounding alone does there.
      saturated_share: share of values of the sample that saturate.
      scale_bytes: of all scales and their reciprocals.
    """

    name: Literal["saved", "live_head", "live_tensor"]
    kl_mean: float
    top1_agreement: float
    local_attention_error: tuple[float, ...]
    saturated_share: float
    scale_bytes: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TwoDrifts(Checked):
    """The two ways to lose, kept apart on the attribution's sample.

    Attributes:
      saturated_share: of all K and V values of the workload: activations that left
        the saved envelope.
      kl_saved: loss with the saved scales.
      kl_fitted: loss with scales made from this very traffic (same granularity):
        what rounding costs although nothing leaves the envelope.
      kl_from_scales: `kl_saved - kl_fitted`: what better scales would win back.
        Negative if the saved ones happen to do better.
      words: the reading of it in a sentence.
    """

    saturated_share: float
    kl_saved: float
    kl_fitted: float
    kl_from_scales: float
    words: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoss(Checked):
    """FP8 in one layer alone.

    Attributes:
      kl_mean, top1_agreement: the rest of the model keeps full precision.
      share: of the sum of `kl_mean` over all layers.
      head_kl: FP8 in one KV head of it alone, by head; None if it was not measured.
    """

    layer: Count
    kl_mean: float
    share: float
    top1_agreement: float
    head_kl: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HighPrecisionTrial(Checked):
    """A measured set of layers for `--kv-high-precision-layers`.

    `bytes_per_token` and `extra_bytes_per_token` count K and V over all layers, the
    latter against FP8 everywhere the artifact covers.
    """

    layers: tuple[int, ...]
    kl_mean: float
    top1_agreement: float
    bytes_per_token: Count
    extra_bytes_per_token: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attribution(Checked):
    """Which layers and heads explain the loss, on a small sample.

    Attributes:
      num_samples, num_tokens: the sample's size.
      kl_mean, top1_agreement: FP8 everywhere, saved scales.
      layers: loss by FP8 layer, in order of layers.
      trials: sets of the costliest layers kept wide, each run again.
      recommended: the smallest of the trials that meets the policy's bound on the
        KL; empty if FP8 everywhere meets it, or if no trial does.
      recommendation: the same in a sentence, with gain and cost.
      scales: the same sample with other scales; per tensor against per head.
    """

    num_samples: Count
    num_tokens: Count
    kl_mean: float
    top1_agreement: float
    layers: tuple[LayerLoss, ...]
    trials: tuple[HighPrecisionTrial, ...]
    recommended: tuple[int, ...]
    recommendation: str
    scales: tuple[ScaleTrial, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FormatTrial(Checked):
    """One format of the cache on the attribution's sample.

    Attributes:
      name: as in `fp8kv_jax.drift.formats.FORMATS`.
      kl_mean, top1_agreement: of the whole model over this format.
      local_attention_error: error of each layer's attention output when its inputs
        are exact: what the format alone does there.
      code_bytes_per_token: of codes, over the layers of the report.
      metadata_bytes_per_token: of the scales and zero points that each token brings.
      fixed_metadata_bytes: of the scales that all tokens share.
    """

    name: str
    kl_mean: float
    top1_agreement: float
    local_attention_error: tuple[float, ...]
    code_bytes_per_token: Count
    metadata_bytes_per_token: Count
    fixed_metadata_bytes: Count

    @property
    def bytes_per_token(self) -> int:
        return self.code_bytes_per_token + self.metadata_bytes_per_token


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FormatReport(Checked):
    """Formats side by side: quality on the sample, bytes of the layers in them.

    Attributes:
      num_samples, num_tokens: the sample's size.
      layers: those in the format; the others keep full precision and don't count.
      trials: one a format, in the order asked for.
    """

    num_samples: Count
    num_tokens: Count
    layers: tuple[int, ...]
    trials: tuple[FormatTrial, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheBytes(Checked):
    """Bytes that one kind of cache takes for the workload, each sequence alone.

    Attributes:
      pages: all pages of all layers, their unused ends included.
      page_end_waste: of that, slots after the ends of sequences.
      scales: scales and reciprocals, once for all sequences.
      block_tables: 4 bytes a page of a sequence, once for all layers.
      bytes_per_token: K and V of one token over all layers.
      longest_sequence: pages and block table of the longest sequence.
    """

    pages: Count
    page_end_waste: Count
    scales: Count
    block_tables: Count
    bytes_per_token: Count
    longest_sequence: Count

    @property
    def total(self) -> int:
        return self.pages + self.scales + self.block_tables


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capacity(Checked):
    """Exact bytes in FP8 (with these scales and high-precision layers) and in BF16."""

    page_size: Positive
    num_sequences: Count
    num_tokens: Count
    num_pages: Count
    fp8: CacheBytes
    bf16: CacheBytes
    saved_share: float
