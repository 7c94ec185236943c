"""Flags of `fp8kv serve`, under the names serving people know."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

# Of timeouts, in seconds.
_SHORTEST = 0.01


class ReadyWhen(StrEnum):
    ACCEPTING = "accepting"
    FROZEN = "frozen"


Host = Annotated[
    str, typer.Option("--host", metavar="HOST", help="Address to listen on.")
]
Port = Annotated[
    int,
    typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        show_default="the variable FP8KV_API_KEY, or no key",
        help="A file with the key that clients must give.",
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        show_default="the model's file name",
        help="What clients call the model.",
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        metavar="N",
        min=1,
        show_default="32; 4 on a CPU",
        help="Continuations run at a time.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="N",
        min=1,
        show_default="the model's context, at most 4096",
        help="Longest sequence, prompt and answer together.",
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        min=1,
        show_default="512, or what a chunk needs; that alone on a CPU",
        help="Tokens of a step at most.",
    ),
]
NumPages = Annotated[
    int | None,
    typer.Option(
        "--num-pages",
        metavar="N",
        min=1,
        show_default="what the device has room for",
        help="Pages of the pool.",
    ),
]
MaxOpen = Annotated[
    int,
    typer.Option(
        "--max-open-requests",
        metavar="N",
        min=1,
        help="Continuations that wait or run; more are refused with 429.",
    ),
]
MaxBodyBytes = Annotated[
    int,
    typer.Option("--max-body-bytes", metavar="N", min=1, help="Size of a request."),
]
BodyTimeout = Annotated[
    float,
    typer.Option(
        "--body-timeout",
        metavar="S",
        min=_SHORTEST,
        help="Seconds for a client to send headers, and again for the body.",
    ),
]
RequestTimeout = Annotated[
    float,
    typer.Option(
        "--request-timeout",
        metavar="S",
        min=_SHORTEST,
        help="Seconds for a whole request.",
    ),
]
ShutdownTimeout = Annotated[
    float,
    typer.Option(
        "--shutdown-timeout",
        metavar="S",
        min=0,
        help="Seconds for requests under way once the server is told to stop.",
    ),
]
CalibrationPrompts = Annotated[
    Path | None,
    typer.Option(
        "--calibration-prompts",
        metavar="PATH",
        show_default=False,
        help="Calibrate on these before accepting requests; as --data of calibrate.",
    ),
]
Ready = Annotated[
    ReadyWhen, typer.Option("--ready-when", help="What makes /ready say 200.")
]
Snapshot = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        metavar="DIR",
        show_default=False,
        help="Start from the snapshot there; save one at the freeze and at the end.",
    ),
]
SnapshotPages = Annotated[
    int,
    typer.Option(
        "--snapshot-pages",
        metavar="N",
        min=0,
        help="Pages of cached prefixes that the snapshot at the end holds at most.",
    ),
]
CompilationCache = Annotated[
    Path | None,
    typer.Option(
        "--compilation-cache",
        metavar="DIR",
        show_default=False,
        help="Keep what is compiled there for the next start.",
    ),
]
