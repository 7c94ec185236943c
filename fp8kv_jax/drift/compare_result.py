"""What a comparison of two artifacts found, and the verdict on it."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from fp8kv_jax.drift.compare_statistics import Change, Estimate

SCHEMA_VERSION = 1

type Outcome = Literal["better", "within", "unclear", "worse"]
type Verdict = Literal["better", "no_worse", "unclear", "worse"]
# A faster run alone is no reason to change scales: only these make B the better one.
_MERITS = ("kl_mean", "top1_agreement", "perplexity_drift", "cache_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much worse B may be and still count as no worse, checked when built.

    Args:
      kl: increase of the mean KL, in nats.
      top1: decrease of the top-1 agreement.
      perplexity: increase of its distance from full precision's, relative to that.
      speed: relative decrease of tokens per second, or increase of a time.
      cache_bytes: relative increase.
    """

    kl: float = 0.002
    top1: float = 0.01
    perplexity: float = 0.01
    speed: float = 0.1
    cache_bytes: float = 0.01

    def __post_init__(self) -> None:
        for name, bound in dataclasses.asdict(self).items():
            if not 0 <= bound < float("inf"):
                raise ValueError(
                    f"Expected the bound on {name} to be a number from 0 on, got {bound}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One figure, side by side.

    Attributes:
      name: what is measured.
      unit: of `a` and `b`.
      higher_is_better: which way is good.
      a, b: of the two artifacts.
      change: from A to B, a difference or relative; see `change_kind`.
      bound: how far the change may go the bad way.
      outcome: "better": the whole interval lies on the good side of no change;
        "within": the whole interval is no worse than the bound; "worse": it lies on the
        bad side of no change and its middle beyond the bound; "unclear": too wide to
        say.
    """

    name: str
    unit: str
    higher_is_better: bool
    a: Estimate
    b: Estimate
    change_kind: Change
    change: Estimate
    bound: float
    outcome: Outcome


def judge(
    estimates: tuple[Estimate, Estimate, Estimate],
    *,
    name: str,
    unit: str,
    change_kind: Change,
    bound: float,
    higher_is_better: bool = False,
) -> Measure:
    """Holds a change against its bound."""
    a, b, change = estimates
    sign = -1 if higher_is_better else 1
    loss = sign * change.value
    ends = (change.low, change.high)
    least, most = sorted(sign * x if x is not None else loss for x in ends)
    outcome: Outcome = "unclear"
    if most < 0:
        outcome = "better"
    elif most <= bound:
        outcome = "within"
    elif least > 0 and loss > bound:
        outcome = "worse"
    return Measure(
        name=name,
        unit=unit,
        higher_is_better=higher_is_better,
        a=a,
        b=b,
        change_kind=change_kind,
        change=change,
        bound=bound,
        outcome=outcome,
    )


def conclude(measures: Sequence[Measure]) -> Verdict:
    """One word for all: any loss counts, then any doubt, then any gain."""
    outcomes = {measure.outcome for measure in measures}
    if "worse" in outcomes:
        return "worse"
    if "unclear" in outcomes:
        return "unclear"
    gains = [m for m in measures if m.outcome == "better" and m.name in _MERITS]
    return "better" if gains else "no_worse"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two artifacts.

    Attributes:
      artifact_id, granularity: of the artifact.
      uncovered_layers: layers it has no scales for; they keep the compute dtype.
      allowed_mismatches: differences from the model that were accepted, with reason.
      bytes_per_token: K and V of one token over all layers.
      preemptions: sequences that lost their pages to others while they ran. The loop
        that runs here gives every sequence its pages for good.
    """

    artifact_id: str
    granularity: str
    uncovered_layers: tuple[int, ...]
    allowed_mismatches: tuple[str, ...]
    bytes_per_token: int
    preemptions: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Perplexities:
    """Perplexity of the full-precision run, and with the scales of A and B.

    Lower than in full precision is no merit: the model is another one by as much.
    """

    full: float
    a: float
    b: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that `fp8kv compare` found.

    Attributes:
      num_prompts, num_tokens: prompts and tokens scored.
      perplexity: of the three runs; None if no token follows another.
      num_rounds: rounds that were timed, each on A and on B; 0 if none was.
      settings: what else the figures depend on.
    """

    created_at: str
    library_versions: dict[str, str]
    model_name: str
    workload_name: str
    workload_sha256: str
    num_prompts: int
    num_tokens: int
    perplexity: Perplexities | None
    num_rounds: int
    settings: dict[str, Any]
    a: Side
    b: Side
    measures: tuple[Measure, ...]
    verdict: Verdict
    seconds: float

    def to_json(self) -> str:
        """One line of JSON, without NaN."""
        fields = {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(self)
        return json.dumps(fields, allow_nan=False)
