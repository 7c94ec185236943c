"""Flags of `fp8kv calibrate`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fp8kv_jax.cli.options import ScaleGranularity


class Rule(StrEnum):
    """How scales follow from what was observed."""

    AMAX = "amax"


Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="[NAME=]PATH",
        show_default=False,
        help="A .jsonl file of chats or texts, a text file, or a folder of code. "
        "Repeatable; NAME is the data class, by default chat, text or code.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="DIR", show_default=False, help="Where the artifact goes."
    ),
]
NumSamples = Annotated[
    int, typer.Option("--num-samples", metavar="N", help="Samples to draw.")
]
MaxSeqLen = Annotated[
    int,
    typer.Option("--max-seq-len", metavar="N", help="Tokens at which a sample is cut."),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="What draws and cuts depend on.")
]
Granularity = Annotated[
    ScaleGranularity,
    typer.Option("--granularity", help="One scale per layer, or per KV head."),
]
Headroom = Annotated[
    float,
    typer.Option(
        "--headroom",
        metavar="X",
        help="How far above the largest value seen the scales reach.",
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        metavar="N",
        help="Samples of full length that a device takes at once; of shorter ones it "
        "takes more.",
    ),
]
ScaleRule = Annotated[
    Rule, typer.Option("--rule", help="How scales follow from the text.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume", help="Go on where a killed run of this kind stopped."
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        "--work-dir",
        metavar="DIR",
        show_default="OUT.running, removed at the end",
        help="Where the running state is saved.",
    ),
]
SaveEvery = Annotated[
    int,
    typer.Option("--save-every", metavar="N", help="Batches between two saves."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an artifact in DIR.")
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        show_default=False,
        help="Where process 0 of several listens.",
    ),
]
NumProcesses = Annotated[
    int, typer.Option("--num-processes", metavar="N", help="Processes that share.")
]
ProcessId = Annotated[
    int | None,
    typer.Option(
        "--process-id",
        metavar="I",
        show_default=False,
        help="Which of them this is, from 0.",
    ),
]
