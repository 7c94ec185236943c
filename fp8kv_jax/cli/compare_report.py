"""What `fp8kv compare` says when it is done: a table, or JSON."""

from dataclasses import astuple

from rich import box
from rich.console import Console
from rich.table import Table

from fp8kv_jax.drift.compare_result import Comparison, Measure
from fp8kv_jax.drift.compare_statistics import Estimate

# A file has no edge that a table should be squeezed to.
_FILE_WIDTH = 180
_NAMES = {
    "kl_mean": "mean KL, nats",
    "top1_agreement": "top-1 agreement",
    "perplexity_drift": "perplexity, off full precision",
    "cache_bytes": "cache, bytes",
    "tokens_per_s": "tokens per second",
    "time_to_first_token": "time to first token, s",
    "time_per_output_token": "time per output token, s",
}
VERDICTS = {
    "better": "B is better than A, and in nothing worse than the bounds allow",
    "no_worse": "B is no worse than A within the bounds",
    "unclear": "the intervals are too wide to say that B is no worse: more prompts or "
    "--repeats narrow them",
    "worse": "B is worse than A",
}


def show(comparison: Comparison, *, as_json: bool) -> None:
    """Prints one JSON object to stdout, or a table to stderr."""
    if as_json:
        print(comparison.to_json())
        return
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(_table(comparison))
    for line in _lines(comparison):
        console.print(line, soft_wrap=True, markup=False)


def _table(comparison: Comparison) -> Table:
    a, b = (
        f"{name} {side.artifact_id[:8]}"
        for name, side in (("A", comparison.a), ("B", comparison.b))
    )
    headers = ("", a, b, "change, 95 % interval", "bound", "")
    table = Table(*headers, box=box.SIMPLE)
    for column in table.columns[1:5]:
        column.justify = "right"
    for measure in comparison.measures:
        table.add_row(
            _NAMES[measure.name],
            _figure(measure.a),
            _figure(measure.b),
            _change(measure),
            _bound(measure),
            measure.outcome,
        )
    preemptions = (str(side.preemptions) for side in (comparison.a, comparison.b))
    table.add_row("preemptions", *preemptions, "", "", "")
    return table


def _figure(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:,.0f}"
    value, low, high = (
        f"{x:.3g}" for x in (estimate.value, estimate.low, estimate.high)
    )
    return f"{value} ({low} to {high})"


def _change(measure: Measure) -> str:
    change = measure.change
    form = "+.2%" if measure.change_kind == "relative" else "+.3g"
    if change.low is None or change.high is None:
        return format(change.value, form)
    value, low, high = (
        format(x, form) for x in (change.value, change.low, change.high)
    )
    return f"{value} ({low} to {high})"


def _bound(measure: Measure) -> str:
    sign = "-" if measure.higher_is_better else "+"
    form = ".2%" if measure.change_kind == "relative" else ".3g"
    return f"{sign}{measure.bound:{form}}"


def _lines(comparison: Comparison) -> list[str]:
    lines = [
        f"{comparison.num_prompts} prompts, {comparison.num_tokens:,} tokens scored; "
        f"{comparison.num_rounds} rounds timed, each on A and on B"
    ]
    if comparison.perplexity is not None:
        full, a, b = astuple(comparison.perplexity)
        lines.append(
            f"perplexity: {full:.4g} in full precision, {a:.4g} with A, {b:.4g} with B"
        )
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        lines += [f"{name}: allowed: {words}" for words in side.allowed_mismatches]
        if side.uncovered_layers:
            layers = ", ".join(map(str, side.uncovered_layers))
            lines.append(f"{name}: layers {layers} keep the compute type")
    return [*lines, f"{comparison.verdict}: {VERDICTS[comparison.verdict]}"]
