"""`fp8kv scales rebind`: binds proven scales to a new checkpoint of their model."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fp8kv_jax.cli import options
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.model import load
from fp8kv_jax.drift.result_evidence import rebind
from fp8kv_jax.scales.artifact import read_artifact, write_artifact
from fp8kv_jax.scales.registry import find_artifact

_Artifact = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        show_default=False,
        help="The artifact, or a registry: its live one.",
    ),
]
_Model = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="PATH",
        show_default=False,
        help="The new checkpoint: a GGUF file or a Hugging Face directory.",
    ),
]
_Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        show_default=False,
        help="Where the artifact goes that is bound to it.",
    ),
]


def rebind_command(
    artifact: _Artifact, model: _Model, out: _Out, as_json: options.Json = False
) -> None:
    """Binds an artifact's scales to another checkpoint, if a replay there has passed.

    The proof is evidence of `fp8kv replay --allow-mismatch REASON --attach-evidence`
    with exactly that model and these scales.
    """
    if out.exists():
        raise UserError(f"Expected --out to name a new folder, {out} exists.")
    with checking_input():
        try:
            scale_set, manifest = read_artifact(find_artifact(artifact))
        except OSError as error:
            raise UserError(f"Expected {artifact} to be readable: {error}.") from error
    identity = identify(load(model, options.ComputeDtype.BFLOAT16))
    with checking_input():
        bound = rebind(scale_set, manifest, identity)
        try:
            written = write_artifact(out, scale_set, bound)
        except OSError as error:
            raise UserError(f"Expected to write {out}: {error.strerror}.") from error
    if as_json:
        names = {"artifact_id": written.artifact_id, "parent": written.parent}
        print(json.dumps(names | {"path": str(out)}))
        return
    line = f"wrote {out} (artifact {written.artifact_id}, bound anew from {written.parent})"
    Console(highlight=False).print(line, soft_wrap=True, markup=False)
