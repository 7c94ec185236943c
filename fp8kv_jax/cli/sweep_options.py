"""Flags of `fp8kv sweep`, and the lists of values that they hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fp8kv_jax.cli.errors import UserError

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        show_default=False,
        help="A recorded K/V trace (safetensors).",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="[NAME=]PATH",
        show_default=False,
        help="Instead of a trace: text to record one from, as `fp8kv calibrate` reads "
        "it. Repeatable; NAME is the class of text.",
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        show_default=False,
        help="Keep the trace recorded from --data.",
    ),
]
NumSamples = Annotated[
    int, typer.Option("--num-samples", metavar="N", help="Texts to draw from --data.")
]
MaxSeqLen = Annotated[
    int, typer.Option("--max-seq-len", metavar="N", help="Tokens at which one is cut.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="What draws and cuts depend on.")
]
Orders = Annotated[
    list[str] | None,
    typer.Option(
        "--order",
        metavar="CLASS,...",
        show_default="each class first once, then the rest",
        help="Order of traffic; * stands for all other classes, mixed. Repeatable.",
    ),
]
OrderSeeds = Annotated[
    str,
    typer.Option(
        "--order-seeds",
        metavar="none|N,...",
        help="Shuffle the texts of a class, and of *, by each of these seeds; none "
        "keeps them as recorded.",
    ),
]
HeldOut = Annotated[
    str,
    typer.Option(
        "--held-out",
        metavar="CLASS,...",
        show_default=False,
        help="Classes that * leaves out. What no order names is reported as held out.",
    ),
]
Windows = Annotated[
    str,
    typer.Option("--windows", metavar="N,...", help="Window sizes, 1 to 4096 tokens."),
]
Chunks = Annotated[
    str,
    typer.Option(
        "--chunk",
        metavar="N,...",
        help="Tokens of the largest batch: the one that completes a window counts "
        "whole.",
    ),
]
Granularities = Annotated[
    str,
    typer.Option(
        "--granularity",
        metavar="tensor|head,...",
        help="One scale per layer, or per KV head.",
    ),
]
Headrooms = Annotated[
    str,
    typer.Option(
        "--headroom",
        metavar="X,...",
        help="How far above the largest value seen the scales reach.",
    ),
]
Rules = Annotated[
    str,
    typer.Option(
        "--rule",
        metavar="amax|pX,...",
        help="What scales are made from: the amax, or a percentile such as p99.99.",
    ),
]
Formats = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="NAME,...",
        help="Formats with static scales: fp8_e4m3, fp8_e5m2, int8, int4.",
    ),
]
QualitySettings = Annotated[
    int,
    typer.Option(
        "--quality-settings",
        metavar="N",
        help="With a model: measure KL and top-1 of at most N scale sets, up to 8.",
    ),
]
QualityTokens = Annotated[
    int,
    typer.Option(
        "--quality-tokens",
        metavar="N",
        help="Tokens to measure them on, held-out ones if there are any.",
    ),
]
Csv = Annotated[
    Path | None,
    typer.Option(
        "--csv", metavar="FILE", show_default=False, help="Write a row per setting."
    ),
]
Plots = Annotated[
    Path | None,
    typer.Option(
        "--plots",
        metavar="DIR",
        show_default=False,
        help="Write figures as PNG (needs matplotlib, the `plot` extra).",
    ),
]


def parse_list[T](flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Reads values with commas between them, each once.

    Raises:
      UserError: if one is missing or of another kind.
    """
    values = []
    for part in text.split(","):
        try:
            if not part.strip():
                raise ValueError
            values.append(kind(part.strip()))
        except ValueError:
            wanted = {int: "whole numbers", float: "numbers"}.get(kind, "names")  # type: ignore[call-overload]
            raise UserError(
                f"Expected {flag} to be {wanted} with commas between them, got {text!r}."
            ) from None
    return tuple(dict.fromkeys(values))


def parse_seeds(text: str) -> tuple[int | None, ...]:
    """Reads "none" or seeds with commas between them."""
    if text.strip().lower() == "none":
        return (None,)
    return parse_list("--order-seeds", text, int)
