"""Flags of `fp8kv compare`."""

from pathlib import Path
from typing import Annotated

import typer

A = Annotated[
    Path,
    typer.Argument(
        metavar="A",
        show_default=False,
        help="The artifact in use, or a registry: its live one.",
    ),
]
B = Annotated[
    Path,
    typer.Argument(
        metavar="B", show_default=False, help="The artifact that may replace it."
    ),
]
Workload = Annotated[
    Path,
    typer.Option(
        "--workload",
        metavar="FILE",
        show_default=False,
        help="JSON lines of prompts or chats, as for replay.",
    ),
]
NumPrompts = Annotated[
    int,
    typer.Option(
        "--prompts",
        metavar="N",
        help="Prompts to draw from the workload, of all classes in turn.",
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency", metavar="N", help="Prompts that are served together, a round."
    ),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats", metavar="N", help="Times each round is run; 0 measures no times."
    ),
]
Draws = Annotated[
    int,
    typer.Option("--draws", metavar="N", help="Draws of the bootstrap."),
]
MaxKlIncrease = Annotated[
    float,
    typer.Option(
        "--max-kl-increase",
        metavar="X",
        help="Mean KL, in nats, that B may lie above A and be no worse.",
    ),
]
MaxTop1Drop = Annotated[
    float,
    typer.Option(
        "--max-top1-drop", metavar="X", help="Top-1 agreement that B may lie below A."
    ),
]
MaxPerplexityIncrease = Annotated[
    float,
    typer.Option(
        "--max-perplexity-increase",
        metavar="X",
        help="Share of full precision's perplexity that B's may lie further from it.",
    ),
]
MaxSlowdown = Annotated[
    float,
    typer.Option(
        "--max-slowdown",
        metavar="X",
        help="Share that B's tokens per second may lie below A's, or its times above.",
    ),
]
