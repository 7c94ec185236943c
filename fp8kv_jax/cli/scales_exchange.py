"""`fp8kv scales import` and `fp8kv scales export`: other projects' scale files."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Generator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import safetensors
import typer
from rich.console import Console

from fp8kv_jax.cli import options
from fp8kv_jax.cli.errors import UserError, checking_input
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.model import load
from fp8kv_jax.cli.screen import Screen
from fp8kv_jax.scales.artifact import read_artifact, write_artifact
from fp8kv_jax.scales.exports import export_scales
from fp8kv_jax.scales.imports import ALL_ONE, import_scales, source_files
from fp8kv_jax.scales.manifest import (
    RULE_GIVEN,
    DataFile,
    DataManifest,
    Evidence,
    Manifest,
    make_manifest,
)
from fp8kv_jax.scales.registry import find_artifact
from fp8kv_jax.scales.scale_set import ScaleSet

if TYPE_CHECKING:
    from models.loading import LoadedModel

# A file of scales alone is far smaller; one that holds weights takes minutes to hash.
MAX_HASHED_BYTES = 256 * 2**20


class Format(StrEnum):
    VLLM = "vllm"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    LEGACY_JSON = "legacy-json"


class ScaleDtype(StrEnum):
    FLOAT32 = "float32"
    BF16 = "bf16"


_Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        show_default=False,
        help="A safetensors file, a folder of a checkpoint, or the old JSON.",
    ),
]
_ArtifactOut = Annotated[
    Path,
    typer.Option(
        "--out", metavar="DIR", show_default=False, help="Where the artifact goes."
    ),
]
_Fnuz = Annotated[
    bool,
    typer.Option(
        "--fnuz", help="The scales are for float8_e4m3fnuz (ROCm): double them."
    ),
]
_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an artifact in DIR.")
]
_Artifact = Annotated[
    Path,
    typer.Argument(metavar="ARTIFACT", show_default=False, help="Its folder."),
]
_Format = Annotated[
    Format, typer.Option("--format", show_default=False, help="Whose names to use.")
]
_ExportOut = Annotated[
    Path,
    typer.Option(
        "--out", metavar="DIR", show_default=False, help="Where the files go."
    ),
]
_ScaleDtype = Annotated[
    ScaleDtype,
    typer.Option("--dtype", help="bf16 rounds each scale up, never down."),
]
_CheckedModel = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="PATH",
        show_default=False,
        help="Checks the exported names against this model's tensors, and takes over "
        "what they begin with.",
    ),
]


def import_command(
    source: _Source,
    out: _ArtifactOut,
    model: options.Model = None,
    fnuz: _Fnuz = False,
    overwrite: _Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Makes an artifact of scales that another project wrote.

    Every spelling of their names is known, and the recipe beside them is checked.
    What is missing, ambiguous or meant for another format is an error.
    """
    with checking_input():
        source_files(source)
    with Screen(lambda: "loading the model") as screen:
        loaded = load(model, options.ComputeDtype.BFLOAT16)
        with checking_input():
            scale_set, notes = import_scales(
                source,
                num_layers=loaded.config.num_layers,
                num_kv_heads=loaded.config.num_kv_heads,
                model_type=loaded.config.architecture,
                fnuz=fnuz,
            )
        manifest = _describe(source, scale_set, notes, loaded, fnuz=fnuz)
        with checking_input(), _checking_files(out):
            manifest = write_artifact(out, scale_set, manifest, overwrite=overwrite)
        for note in notes:
            if note != ALL_ONE:  # which was a warning already
                screen.note(f"note: {note}")
        screen.note(
            f"{len(scale_set.layers)} of {loaded.config.num_layers} layers have "
            f"scales, per {scale_set.granularity}; wrote {out} (artifact "
            f"{manifest.artifact_id})"
        )
    if as_json:
        result = {
            "artifact": {"path": str(out), "id": manifest.artifact_id},
            "granularity": scale_set.granularity,
            "layers": list(scale_set.layers),
            "skipped_layers": list(manifest.skipped_layers),
            "notes": notes,
        }
        print(json.dumps(result, allow_nan=False))


def export_command(
    artifact: _Artifact,
    format_: _Format,
    out: _ExportOut,
    dtype: _ScaleDtype = ScaleDtype.FLOAT32,
    model: _CheckedModel = None,
    as_json: options.Json = False,
) -> None:
    """Writes an artifact's scales to the files that another project loads.

    Nothing but scales and the recipe that goes with them is written, and no file that
    is there already is replaced by another one.
    """
    with checking_input(), _checking_files(out):
        scale_set, manifest = read_artifact(find_artifact(artifact))
        files = export_scales(
            scale_set,
            out,
            format=format_.value,
            dtype=dtype.value,
            names=None if model is None else tensor_names(model),
            model_type=manifest.model.architecture,
        )
    if as_json:
        result = {"format": format_.value, "files": [str(file) for file in files]}
        print(json.dumps(result, allow_nan=False))
        return
    names = ", ".join(file.name for file in files)
    console = Console(stderr=True, highlight=False)
    console.print(
        f"{len(scale_set.layers)} layers: wrote {names} in {out}",
        soft_wrap=True,
        markup=False,
    )


def tensor_names(model: Path) -> list[str]:
    """Lists a model's tensors, by the names of Hugging Face; reads no weights.

    Raises:
      UserError: if there are none to be read.
    """
    # Here, so that `fp8kv --help` does not wait for it.
    import gguf

    try:
        if model.is_dir():
            return _checkpoint_names(model)
        # Of a GGUF file's tensors, what holds keys is all that matters here.
        found = [_GGUF_KEYS.fullmatch(t.name) for t in gguf.GGUFReader(model).tensors]
    except (OSError, *_DAMAGE) as error:
        raise UserError(
            f"Expected --model {model} to be a GGUF file or a Hugging Face directory "
            f"({error})."
        ) from None
    return [f"model.layers.{m[1]}.self_attn.k_proj.weight" for m in found if m]


# What reading past the end of a cut file, or a random one, raises in the readers.
_DAMAGE = (
    safetensors.SafetensorError,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    MemoryError,
)
_GGUF_KEYS = re.compile(r"blk\.([0-9]+)\.attn_(?:k|qkv)\.weight")


def _checkpoint_names(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("it has no *.safetensors")
    names = []
    for file in files:
        with safetensors.safe_open(file, framework="numpy") as opened:
            names.extend(opened.keys())
    return names


def _describe(
    source: Path,
    scale_set: ScaleSet,
    notes: list[str],
    model: "LoadedModel",
    *,
    fnuz: bool,
) -> Manifest:
    """Describes imported scales: nobody knows what they rest on, but whence they came.

    Notes go into the evidence, which the artifact's id does not cover.
    """
    small = [f for f in source_files(source) if f.stat().st_size <= MAX_HASHED_BYTES]
    manifest = make_manifest(
        scale_set,
        identify(model),
        data=DataManifest(
            source="imported",
            files=tuple(DataFile.of(file, name=file.name) for file in small),
        ),
        headroom=None,
        rule=RULE_GIVEN,
    )
    imported = Evidence(
        kind="import",
        created_at=manifest.created_at,
        verdict="imported",
        summary={"source": source.name, "fnuz": fnuz, "notes": notes},
    )
    return dataclasses.replace(manifest, evidence=(imported,))


@contextlib.contextmanager
def _checking_files(out: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Expected to write {out}: {error.strerror}.") from error
