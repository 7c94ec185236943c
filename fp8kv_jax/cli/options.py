"""Flags that several commands share, under the names serving people know."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fp8kv_jax.cli.errors import UserError


class ComputeDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KvCacheDtype(StrEnum):
    FP8 = "fp8"
    BF16 = "bf16"
    AUTO = "auto"


class UncoveredLayers(StrEnum):
    BF16 = "bf16"
    ONLINE = "online"


class ScaleGranularity(StrEnum):
    TENSOR = "tensor"
    HEAD = "head"


# Plain assignments: typer does not look into `type` aliases.
Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help='Texts to continue; "-" is stdin, which is also read when piped.',
    ),
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        show_default=False,
        help="A file that holds one prompt as a whole. Repeatable.",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Wrap each prompt by the chat template.")
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", metavar="N", help="Tokens to generate for each prompt."
    ),
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", metavar="X", help="0 takes the likeliest token."),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="X",
        help="Draw from the likeliest tokens that together reach this share.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="What draws depend on.")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        show_default="the demo model",
        help="A GGUF file or a Hugging Face directory.",
    ),
]
Dtype = Annotated[
    ComputeDtype | None,
    typer.Option(
        "--dtype",
        show_default="float32 on a CPU, bfloat16 on a GPU",
        help="What the model computes in.",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        metavar="N",
        min=1,
        help="Devices that share the weights and the KV heads.",
    ),
]
CacheDtype = Annotated[
    KvCacheDtype,
    typer.Option("--kv-cache-dtype", help="auto is what the model computes in."),
]
CalibrationTokens = Annotated[
    int,
    typer.Option(
        "--fp8-kv-calibration-tokens",
        metavar="N",
        help="Tokens observed before the scales freeze; 1 freezes on the first batch.",
    ),
]
Headroom = Annotated[
    float,
    typer.Option(
        "--fp8-kv-headroom",
        metavar="X",
        help="How far above the largest value seen the scales reach.",
    ),
]
Granularity = Annotated[
    ScaleGranularity,
    typer.Option("--fp8-kv-granularity", help="One scale per layer, or per KV head."),
]
Scales = Annotated[
    Path | None,
    typer.Option(
        "--fp8-kv-scales",
        metavar="DIR",
        show_default=False,
        help="Use the scales of an artifact, or of a registry's live one: no window.",
    ),
]
SaveScales = Annotated[
    Path | None,
    typer.Option(
        "--save-fp8-kv-scales",
        metavar="DIR",
        show_default=False,
        help="Write the scales that this run froze as an artifact.",
    ),
]
Uncovered = Annotated[
    UncoveredLayers,
    typer.Option(
        "--fp8-kv-uncovered-layers",
        help="What layers do that --fp8-kv-scales skips: keep the compute dtype, or "
        "calibrate over the window.",
    ),
]
AllowMismatch = Annotated[
    str | None,
    typer.Option(
        "--allow-mismatch",
        metavar="REASON",
        show_default=False,
        help="Accept scales of another model; the reason is part of the output.",
    ),
]
HighPrecisionLayers = Annotated[
    str,
    typer.Option(
        "--kv-high-precision-layers",
        metavar="none|0,1,...",
        help="Layers that keep the compute dtype.",
    ),
]
PageSize = Annotated[
    int,
    typer.Option(
        "--page-size",
        metavar="N",
        help="Tokens a page holds; the GPU kernels serve 64 and 128.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout instead.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the scales of every layer.")
]


def check_least(least: int, **numbers: int) -> None:
    """Checks numbers by the names of their flags, underscores for dashes.

    Raises:
      UserError: if one is smaller.
    """
    for name, number in numbers.items():
        if number < least:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"Expected {flag} of at least {least}, got {number}.")


def parse_layers(text: str) -> tuple[int, ...]:
    """Reads "none" or layer indices with commas between them."""
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UserError(
            'Expected --kv-high-precision-layers to be "none" or layer indices such '
            f"as 0,1,29, got {text!r}."
        ) from None
