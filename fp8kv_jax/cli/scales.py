"""`fp8kv scales`: looks at scale artifacts, checks them, and says which is live."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from fp8kv_jax.cli import options, scales_report
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.model import load
from fp8kv_jax.scales.artifact import check_against_model, read_artifact
from fp8kv_jax.scales.diff import PICTURES, diff_scales, plot_diff
from fp8kv_jax.scales.registry import Registry, find_artifact

app = typer.Typer(
    help="Looks at scale artifacts, checks them, and keeps a registry of them.",
    no_args_is_help=False,
    rich_markup_mode=None,
)

_Artifact = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        show_default=False,
        help="An artifact, or a registry: its live one.",
    ),
]
_Registry = Annotated[
    Path,
    typer.Argument(metavar="REGISTRY", show_default=False, help="A registry's folder."),
]
_Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        show_default=False,
        help="An artifact's id, or its first digits (4 at least).",
    ),
]
_IdOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="ID|DIR",
        show_default=False,
        help="An artifact's id, or its first digits; or the folder of one to add.",
    ),
]
_Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        show_default="no model",
        help="The model that the scales must fit: a GGUF file or a Hugging Face "
        "directory.",
    ),
]
_A = Annotated[
    Path,
    typer.Argument(
        metavar="A",
        show_default=False,
        help="An artifact, or a registry: its live one.",
    ),
]
_B = Annotated[
    Path, typer.Argument(metavar="B", show_default=False, help="The same; the newer.")
]
_Threshold = Annotated[
    float,
    typer.Option(
        "--threshold",
        metavar="X",
        help="From which change on a layer counts as moved; 0.05 is 5 %.",
    ),
]
_Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        show_default=False,
        help="Also draw a picture, .png or .svg (needs the plot extra).",
    ),
]
_Force = Annotated[
    bool, typer.Option("--force", help="Delete it even if it is live or needed.")
]


@app.command("inspect")
def inspect(artifact: _Artifact, as_json: options.Json = False) -> None:
    """Shows what an artifact is, what it rests on, and its scales."""
    with _checking_files():
        scale_set, manifest = read_artifact(find_artifact(artifact))
    if as_json:
        _print_json(scales_report.artifact_json(scale_set, manifest))
        return
    _print(*scales_report.describe(manifest), scales_report.scales_table(scale_set))


@app.command("verify")
def verify(
    artifact: _Artifact,
    model: _Model = None,
    allow_mismatch: options.AllowMismatch = None,
    as_json: options.Json = False,
) -> None:
    """Checks an artifact's files, and that a model is the one it was made for."""
    if allow_mismatch is not None and model is None:
        raise UserError("Expected --model with --allow-mismatch, got none.")
    with _checking_files():
        scale_set, manifest = read_artifact(find_artifact(artifact))
    allowed: list[str] = []
    if model is not None:
        identity = identify(load(model, options.ComputeDtype.BFLOAT16))
        with _checking_files():
            allowed = check_against_model(
                scale_set, manifest, identity, allow_mismatch=allow_mismatch
            )
    if as_json:
        result = {"artifact_id": manifest.artifact_id, "model_checked": bool(model)}
        _print_json(result | {"allowed_mismatches": allowed})
        return
    fits = "" if model is None or allowed else ", made for this model"
    _print(f"artifact {manifest.artifact_id}: sound{fits}", *allowed)


@app.command("list")
def list_(registry: _Registry, as_json: options.Json = False) -> None:
    """Lists a registry's artifacts, the newest first."""
    with _checking_files():
        if not registry.is_dir():
            raise UserError(f"Expected {registry} to be a registry's folder.")
        entries = Registry(registry).list()
    if as_json:
        _print_json(scales_report.registry_json(entries))
        return
    broken = [f"{x.artifact_id}: {x.problem}" for x in entries if x.problem]
    _print(scales_report.registry_table(entries), *broken)


@app.command("add")
def add(
    registry: _Registry, artifact: _Artifact, as_json: options.Json = False
) -> None:
    """Copies an artifact into a registry, which is made if it is not there."""
    with _checking_files():
        artifact_id = Registry(registry).add(find_artifact(artifact))
    _report(as_json, f"added {artifact_id}", artifact_id=artifact_id)


@app.command("promote")
def promote(
    registry: _Registry, name: _IdOrFolder, as_json: options.Json = False
) -> None:
    """Makes an artifact of a registry the live one; adds it first if DIR is given."""
    known = Registry(registry)
    with _checking_files():
        before = known.live_id()
        artifact_id = known.promote(known.add(name) if Path(name).is_dir() else name)
    line = f"live: {artifact_id} (before: {before or 'none'})"
    _report(as_json, line, live=artifact_id, before=before)


@app.command("rollback")
def rollback(registry: _Registry, as_json: options.Json = False) -> None:
    """Makes the artifact live again that was so before the last promotion."""
    known = Registry(registry)
    with _checking_files():
        before = known.live_id()
        artifact_id = known.rollback()
    line = f"live: {artifact_id} (before: {before or 'none'})"
    _report(as_json, line, live=artifact_id, before=before)


@app.command("remove")
def remove(
    registry: _Registry,
    name: _Id,
    force: _Force = False,
    as_json: options.Json = False,
) -> None:
    """Deletes an artifact of a registry that is not live nor needed by a rollback."""
    with _checking_files():
        artifact_id = Registry(registry).remove(name, force=force)
    _report(as_json, f"removed {artifact_id}", artifact_id=artifact_id)


@app.command("diff")
def diff(
    a: _A,
    b: _B,
    threshold: _Threshold = 0.05,
    plot: _Plot = None,
    as_json: options.Json = False,
) -> None:
    """Shows by how much the scales of artifact B differ from those of A, by layer."""
    _check_plot(plot)
    if not 0 <= threshold < float("inf"):
        raise UserError(f"Expected --threshold of 0 or more, got {threshold}.")
    with _checking_files():
        (scales_a, manifest_a), (scales_b, manifest_b) = (
            read_artifact(find_artifact(path)) for path in (a, b)
        )
        diffs = diff_scales(scales_a, scales_b)
        if plot is not None:
            names = manifest_a.artifact_id, manifest_b.artifact_id
            plot_diff(diffs, plot, names=names)
    if as_json:
        ids = {"a": manifest_a.artifact_id, "b": manifest_b.artifact_id}
        _print_json(ids | scales_report.diff_json(diffs, threshold))
        return
    models = manifest_a.model.differences(manifest_b.model)
    note = [f"they are of different models: {', '.join(models)}"] if models else []
    table = scales_report.diff_table(diffs, threshold)
    _print(*note, table, scales_report.diff_line(diffs, threshold))


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() not in PICTURES:
        raise UserError(f"Expected --plot FILE to end in .png or .svg, got {plot}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "Expected matplotlib for --plot, but it is not installed: install "
            "fp8kv-jax[plot], or leave out --plot and read the bars in the table."
        )


@contextlib.contextmanager
def _checking_files() -> Generator[None]:
    """Turns what is wrong with files, and with what is in them, into a UserError."""
    try:
        with checking_input():
            yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{place}{error.strerror or error}.") from error


def _report(as_json: bool, line: str, **values: Any) -> None:
    if as_json:
        _print_json(values)
    else:
        _print(line)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))


def _print(*parts: RenderableType) -> None:
    """Prints to stdout: here the table is what was asked for, not a side remark."""
    # A file or a pipe has no edge that lines should be broken at.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
