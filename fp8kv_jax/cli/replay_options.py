"""Flags of `fp8kv replay`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fp8kv_jax.cli.errors import UserError
from fp8kv_jax.drift.formats import FORMATS, Format


class Attribute(StrEnum):
    """How closely a loss is traced."""

    NONE = "none"
    LAYERS = "layers"
    HEADS = "heads"


Scales = Annotated[
    Path,
    typer.Option(
        "--fp8-kv-scales",
        metavar="DIR",
        show_default=False,
        help="The artifact to replay, or a registry: its live one.",
    ),
]
Workload = Annotated[
    Path,
    typer.Option(
        "--workload",
        metavar="FILE",
        show_default=False,
        help="JSON lines of prompts or chats; or a recorded K/V trace (.safetensors), "
        "for which the range alone is looked at and no model runs.",
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        show_default="the built-in policy",
        help="Thresholds and triggers, TOML or .json.",
    ),
]
MaxPromptTokens = Annotated[
    int,
    typer.Option(
        "--max-prompt-tokens", metavar="N", help="Longer samples are cut to N tokens."
    ),
]
Generate = Annotated[
    int,
    typer.Option(
        "--generate",
        metavar="N",
        help="Continue N prompts both ways, of all classes in turn, those with an "
        "expected answer first.",
    ),
]
TokensPerStep = Annotated[
    int,
    typer.Option(
        "--tokens-per-step",
        metavar="N",
        help="Tokens that go through the model at once: memory against speed.",
    ),
]
AttributeTo = Annotated[
    Attribute,
    typer.Option(
        "--attribute",
        help="Run FP8 in one layer at a time on a small sample; heads: also in single "
        "heads of the costliest layers.",
    ),
]
AttributionSamples = Annotated[
    int,
    typer.Option("--attribution-samples", metavar="N", help="Size of that sample."),
]
AttributionTokens = Annotated[
    int,
    typer.Option(
        "--attribution-tokens", metavar="N", help="Tokens of each sample of it."
    ),
]
Formats = Annotated[
    str,
    typer.Option(
        "--formats",
        metavar="NAME,...|all|none",
        help=f"Also run that sample over other formats: {', '.join(FORMATS)}.",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="N", help="Likeliest tokens whose order is looked at."
    ),
]
SmallMargin = Annotated[
    float,
    typer.Option(
        "--small-margin",
        metavar="X",
        help="Gap of two logits up to which a change of their order is a close one.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.html",
        show_default=False,
        help="Also write everything as one HTML file, and as JSON beside it.",
    ),
]
AttachEvidence = Annotated[
    bool,
    typer.Option(
        "--attach-evidence", help="Add the verdict to the artifact's evidence."
    ),
]


def check_report(path: Path | None) -> None:
    """Checks that a report can be written where it should go.

    Raises:
      UserError: if its name or its folder is wrong.
    """
    if path is None:
        return
    if path.suffix != ".html" or not path.absolute().parent.is_dir():
        raise UserError(
            f"Expected --report FILE.html in a folder that exists, got {path}."
        )


def parse_formats(text: str) -> tuple[Format, ...]:
    """Parses "all", "none", or names of formats with commas.

    Raises:
      UserError: if a name is unknown.
    """
    if text == "none":
        return ()
    names = list(FORMATS) if text == "all" else text.split(",")
    for name in names:
        if name not in FORMATS:
            raise UserError(
                f"Expected --formats all, none, or names among {', '.join(FORMATS)}, "
                f"got {name!r}."
            )
    return tuple(FORMATS[name] for name in dict.fromkeys(names))
