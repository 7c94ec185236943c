"""A replay's result as one HTML file: nothing to load, readable on a phone and on paper.

write_report(result, Path("out.html"))  # and out.json beside it
"""

import functools
import json
import re
import shlex
from pathlib import Path

import jinja2

from fp8kv_jax.drift import report_figures as figures
from fp8kv_jax.drift.report_charts import short, small_ratio
from fp8kv_jax.drift.result import Attribution, ReplayResult
from fp8kv_jax.drift.result_quality import alike
from fp8kv_jax.scales.files import write_file

# What HTML does not allow, or what would change how the text around it reads.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def write_report(result: ReplayResult, path: Path) -> None:
    """Writes the report, and the result as JSON under the same name beside it.

    Raises:
      ValueError: if the path ends in .json itself.
      OSError: if the file system refuses.
    """
    beside = path.with_suffix(".json")
    if beside == path:
        raise ValueError(f"Expected a report to end in .html, got {path}.")
    page = render(result)
    write_file(beside, result.to_json().encode() + b"\n")
    write_file(path, page.encode())


def render(result: ReplayResult) -> str:
    """Makes the page; all that came from the workload is escaped."""
    attribution, quality = result.attribution, result.quality
    page = _template().render(
        result=result,
        command=_command(result),
        slice_rows=list(figures.slice_rows(result)),
        range_figures=figures.range_figures(result.range),
        histogram_figures=figures.histogram_figures(result.range),
        worst_tokens=alike(quality.worst_tokens) if quality else [],
        quality_figures=figures.quality_figures(quality) if quality else [],
        error_figure=figures.error_figure(result) if quality else None,
        attribution_figures=(
            figures.attribution_figures(attribution) if attribution else []
        ),
    )
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fp8kv_jax.drift"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        # Three digits for 0.000986, too: it stands below 0.00109.
        "short": _or_dash(functools.partial(short, least=1e-4)),
        "ratio": _or_dash(small_ratio),
        "count": _or_dash(lambda x: f"{x:,}"),
        "percent": _or_dash(lambda x: f"{x:.2%}"),
        "bytes": _or_dash(_bytes),
        # A token may well be white space.
        "quoted": lambda text: json.dumps(text, ensure_ascii=False),
    }
    return environment.get_template("report.html")


def _or_dash(write):
    return lambda value: "\N{EN DASH}" if value is None else write(value)


def _bytes(number: int) -> str:
    """Exact bytes, and a size to remember."""
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number:,}" if unit == "B" else f"{number:,} ({size:.3g} {unit})"


def _attribute(attribution: Attribution | None) -> str:
    """The value of the flag that traces a loss as closely."""
    if attribution is None:
        return "none"
    by_head = any(x.head_kl is not None for x in attribution.layers)
    return "heads" if by_head else "layers"


def _command(result: ReplayResult) -> str:
    """The command that does the same again, its folders left for the reader to name."""
    settings = result.settings
    words = ["fp8kv", "replay", "--fp8-kv-scales", result.artifact.artifact_id]
    words += ["--workload", result.workload.name]
    if settings.high_precision_layers:
        layers = ",".join(map(str, settings.high_precision_layers))
        words += ["--kv-high-precision-layers", layers]
    words += ["--page-size", str(settings.page_size)]
    if result.workload.kind == "text":
        words += ["--dtype", settings.dtype]
        for flag, number in (
            ("--max-prompt-tokens", settings.max_prompt_tokens),
            ("--generate", settings.num_generated_prompts),
            ("--max-new-tokens", settings.max_new_tokens),
            ("--attribution-samples", settings.attribution_samples),
            ("--attribution-tokens", settings.attribution_tokens),
            ("--tokens-per-step", settings.tokens_per_step),
            ("--top-k", settings.top_k),
            ("--small-margin", settings.small_margin),
            ("--seed", settings.seed),
        ):
            # None are drawn if nothing is to run on them; the flag allows no 0.
            if flag != "--attribution-samples" or number:
                words += [flag, f"{number:g}"]
        words += ["--attribute", _attribute(result.attribution)]
        formats = result.formats.trials if result.formats else ()
        words += ["--formats", ",".join(x.name for x in formats) or "none"]
    return shlex.join(words)
