"""Records of a replay: how keys and values lie in the range of the saved scales."""

import dataclasses
from typing import Literal

from fp8kv_jax.scales.fields import Checked, Count, Positive

# [layer][head]. Plain assignments: `decode` does not look into `type` aliases.
Amounts = tuple[tuple[float, ...], ...]
MaybeAmounts = tuple[tuple[float | None, ...], ...]
Counts = tuple[tuple[int, ...], ...]
# [layer][head][bin]
Histograms = tuple[tuple[tuple[int, ...], ...], ...]
Dimension = Literal[
    "overall", "class", "language", "prompt_length", "generation_position"
]
Tensor = Literal["k", "v"]
FlagKind = Literal["clipped", "drifted", "outlier_head", "nonfinite"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slice(Checked):
    """A part of the traffic: everything, or one value of one dimension.

    `name` is the class, the language, or an interval such as "65-256" (tokens); for
    generation positions also "prompt".
    """

    dimension: Dimension
    name: str
    num_tokens: Count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RangeTable(Checked):
    """How the keys, or the values, of a slice lie in the range of the saved scales.

    Measured on the full-precision run, rounded to BF16 as a cache stores them, so
    that it shows the traffic and not what FP8 did to it.

    Attributes:
      live_amax: largest finite value, in units of the activations.
      ratio: live over calibrated amax (of the head's group); None if that is unknown
        or zero.
      saturated: values beyond the largest FP8 number (464 after scaling).
      saturated_tokens: tokens with at least one such value.
      underflowed: nonzero values that become 0.
      nonfinite: NaN and Inf.
      histogram: counts of finite values by `log2(|x| / (448 * scale))`, in bins
        between `RangeReport.histogram_edges`: one below the first edge (what is
        stored as zero), one above the last. A value at an edge lies below it.
    """

    live_amax: Amounts
    ratio: MaybeAmounts
    saturated: Counts
    saturated_tokens: Counts
    underflowed: Counts
    nonfinite: Counts
    histogram: Histograms


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RangeSlice(Checked):
    """The range tables of one slice."""

    slice: Slice
    k: RangeTable
    v: RangeTable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag(Checked):
    """Something about one head that a person should look at.

    Attributes:
      kind: "clipped": values saturate; "drifted": the live amax left the calibrated
        one behind; "outlier_head": one head dwarfs the others of its layer, which a
        scale per layer makes pay; "nonfinite": NaN or Inf.
      value: the number that raised it, and `limit`, what it was held against.
      words: the same in a sentence.
    """

    kind: FlagKind
    tensor: Tensor
    layer: Count
    head: Count
    value: float
    limit: float
    words: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RangeReport(Checked):
    """Range of keys and values, overall (first) and by slice.

    Attributes:
      layers: the FP8 layers: rows of every table here.
      num_kv_heads, head_dim: columns, and values that a token adds to each.
      k_scale, v_scale: the saved scales, one a head.
      k_calibrated_amax, v_calibrated_amax: what they rest on; None if unknown.
      histogram_edges: ascending, as exponents of two; 0 is the end of the range.
      fp8_run_saturated: what the counters of the FP8 run itself say over K and V; may
        differ from the tables a little, because its activations do.
    """

    layers: tuple[int, ...]
    num_kv_heads: Positive
    head_dim: Positive
    k_scale: Amounts
    v_scale: Amounts
    k_calibrated_amax: MaybeAmounts
    v_calibrated_amax: MaybeAmounts
    histogram_edges: tuple[float, ...]
    slices: tuple[RangeSlice, ...]
    flags: tuple[Flag, ...]
    fp8_run_saturated: Count | None

    @property
    def overall(self) -> RangeSlice:
        return self.slices[0]
