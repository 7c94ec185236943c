"""What `fp8kv sweep` says: a table, JSON, CSV and figures."""

import csv as csv_module
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fp8kv_jax.cli.errors import UserError
from fp8kv_jax.drift.sweep import Loss, Outcome
from fp8kv_jax.drift.sweep_plots import (
    draw_figures,
    total_saturated,
    varying_fields,
)
from fp8kv_jax.drift.sweep_quality import Quality
from fp8kv_jax.drift.trace import Trace
from fp8kv_jax.scales.files import write_file


@dataclass(frozen=True, kw_only=True)
class Done:
    """A finished sweep; `quality` is None where it was not measured."""

    trace: Trace
    outcomes: Sequence[Outcome]
    quality: Sequence[dict[str, Quality] | None]
    sweep_s: float
    total_s: float


def report(done: Done, *, as_json: bool, csv: Path | None, plots: Path | None) -> None:
    try:
        if csv is not None:
            write_file(csv.absolute(), _csv(done).encode())
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
            for name, png in draw_figures(done.outcomes, done.quality).items():
                write_file(plots.absolute() / name, png)
    except OSError as error:
        raise UserError(f"Expected to write {error.filename}: {error.strerror}.") from (
            error
        )
    if as_json:
        print(json.dumps(_as_json(done), allow_nan=False))
        return
    console = Console(stderr=True, highlight=False)
    console.print(_table(done))
    measured = len({id(q) for q in done.quality if q is not None})
    line = (
        f"{len(done.outcomes)} settings over {done.trace.num_tokens:,} tokens of "
        f"{len(done.trace.texts)} texts in {done.sweep_s:.1f} s, quality of {measured} "
        f"scale sets in {done.total_s - done.sweep_s:.1f} s"
    )
    console.print(line, soft_wrap=True, markup=False)


def _as_json(done: Done) -> dict[str, Any]:
    trace = done.trace
    return {
        "trace": {
            **trace.shape._asdict(),
            "num_tokens": trace.num_tokens,
            "texts": {text.name: text.num_tokens for text in trace.texts},
        },
        "settings": [
            _setting_json(outcome, quality)
            for outcome, quality in zip(done.outcomes, done.quality, strict=True)
        ],
        "timing": {"sweep_s": done.sweep_s, "total_s": done.total_s},
    }


def _setting_json(
    outcome: Outcome, quality: dict[str, Quality] | None
) -> dict[str, Any]:
    setting = outcome.setting
    k_scale, v_scale = (_by_layer(outcome, scale) for scale in outcome.scales)
    return {
        "window": setting.window,
        "granularity": setting.granularity,
        "headroom": setting.headroom,
        "order": list(setting.order),
        "order_seed": setting.seed,
        "chunk": setting.chunk,
        "rule": setting.rule,
        "format": setting.number_format,
        "frozen_at": outcome.frozen_at,
        **_loss_json(outcome.written),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "no_signal": _no_signal(outcome),
        "held_out": {name: _loss_json(x) for name, x in outcome.held_out.items()},
        "staged_bytes": outcome.staged_bytes,
        "quality": quality and {name: asdict(q) for name, q in quality.items()},
    }


def _by_layer(outcome: Outcome, scale: np.ndarray) -> list[Any]:
    """A number for each layer, or a list of one for each KV head."""
    per_head = outcome.setting.granularity == "head"
    return scale.tolist() if per_head else scale[:, 0].tolist()


def _loss_json(loss: Loss) -> dict[str, Any]:
    def by_tensor(values: np.ndarray) -> dict[str, list[Any]]:
        return {"k": values[0].tolist(), "v": values[1].tolist()}

    return {
        "num_tokens": loss.num_tokens,
        "saturated": by_tensor(loss.saturated),
        "underflowed": by_tensor(loss.underflowed),
        "relative_error": by_tensor(loss.relative_error),
    }


def _no_signal(outcome: Outcome) -> list[str]:
    per_head = outcome.setting.granularity == "head"
    return [
        f"{layer}.{'kv'[which]}" + (f"[{group}]" if per_head else "")
        for which, layer, group in np.argwhere(outcome.no_signal)
    ]


type _Row = dict[str, Any]


def _rows(done: Done) -> list[_Row]:
    """One flat row for each setting."""
    rows = []
    for outcome, quality in zip(done.outcomes, done.quality, strict=True):
        setting = outcome.setting
        saturated = outcome.written.saturated
        overall = quality["all"] if quality else None
        rows.append(
            {
                "order": ",".join(setting.order),
                "order_seed": setting.seed,
                "chunk": setting.chunk,
                "granularity": setting.granularity,
                "headroom": setting.headroom,
                "rule": setting.rule,
                "format": setting.number_format,
                "window": setting.window,
                "frozen_at": outcome.frozen_at,
                "saturated": int(saturated.sum()),
                "k_saturated": int(saturated[0].sum()),
                "v_saturated": int(saturated[1].sum()),
                "worst": _worst(saturated),
                "held_out_saturated": total_saturated(outcome, held_out=True),
                "k_error": float(outcome.written.relative_error[0].mean()),
                "v_error": float(outcome.written.relative_error[1].mean()),
                "staged_bytes": outcome.staged_bytes,
                "kl": overall and overall.kl,
                "top1": overall and overall.top1,
            }
        )
    return rows


def _worst(saturated: np.ndarray) -> str:
    """Names where most values saturated, `V26 +3` for V of layer 26 and three more."""
    hit = np.argwhere(saturated)
    if not len(hit):
        return ""
    which, layer = np.unravel_index(saturated.argmax(), saturated.shape)
    others = f" +{len(hit) - 1}" if len(hit) > 1 else ""
    return f"{'KV'[which]}{layer}{others}"


def _csv(done: Done) -> str:
    rows = _rows(done)
    text = io.StringIO()
    writer = csv_module.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


# Column titles, and how a value is shown; those of a setting first, but its window.
_SETTING_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "order": ("order", lambda order: order.replace(",", " ")),
    "order_seed": ("seed", str),
    "chunk": ("chunk", _count),
    "granularity": ("granularity", str),
    "headroom": ("headroom", "{:g}".format),
    "rule": ("rule", str),
    "format": ("format", str),
}
_RESULT_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "window": ("window", _count),
    "frozen_at": ("frozen", _count),
    "saturated": ("saturated", _count),
    "worst": ("most in", str),
    "held_out_saturated": ("held out", _count),
    "kl": ("KL", lambda kl: "-" if kl is None else f"{kl:.4f}"),
    "top1": ("top-1", lambda share: "-" if share is None else f"{share:.1%}"),
}
_LEFT = ("order", "granularity", "rule", "format", "worst")
# Left out of the table if nothing is known.
_OPTIONAL = ("held_out_saturated", "kl", "top1")


def _table(done: Done) -> Table:
    """A row for each setting; what all settings share stands in the title."""
    rows = _rows(done)
    varying = varying_fields([outcome.setting for outcome in done.outcomes])
    fixed = [
        f"{title} {show(rows[0][key])}"
        for key, (title, show) in _SETTING_COLUMNS.items()
        if key not in varying and rows[0][key] is not None
    ]
    left = {key: _SETTING_COLUMNS[key] for key in _SETTING_COLUMNS if key in varying}
    right = {
        key: column
        for key, column in _RESULT_COLUMNS.items()
        if key not in _OPTIONAL or any(row[key] is not None for row in rows)
    }
    table = Table(title=", ".join(fixed), box=box.SIMPLE, title_style="dim")
    table.padding = (0, 1, 0, 0)
    for key, (title, show) in (left | right).items():
        # What a setting is may wrap; a number must not lose a digit.
        is_result = key in right
        longest = max(len(show(row[key])) for row in rows) if is_result else 1
        justify = "left" if key in _LEFT else "right"
        table.add_column(
            title, justify=justify, no_wrap=is_result, min_width=max(longest, 4)
        )
    above: list[str] = []
    for row in rows:
        setting = [show(row[key]) for key, (_, show) in left.items()]
        # Windows of one line of settings are listed below it.
        shown = [""] * len(setting) if setting == above else setting
        above = setting
        table.add_row(*shown, *(show(row[key]) for key, (_, show) in right.items()))
    return table
