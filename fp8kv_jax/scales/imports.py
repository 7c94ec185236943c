"""Imports scales from the files of other projects, in every spelling they use."""

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8kv_jax.calibration import Granularity
from fp8kv_jax.scales import spellings
from fp8kv_jax.scales.scale_files import (
    FNUZ_DTYPE,
    LEGACY_FILE,
    Found,
    StoredScale,
    as_float32,
    granularity_of,
    list_layers,
    read_beside,
    read_legacy,
    read_safetensors,
    shorten,
)
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet
from fp8kv_jax.scales.spellings import Role


def import_scales(
    path: str | os.PathLike[str],
    *,
    num_layers: int,
    num_kv_heads: int,
    model_type: str | None = None,
    fnuz: bool = False,
) -> tuple[ScaleSet, list[str]]:
    """Reads scales that another project wrote, and refuses what it can't be sure of.

    Reads a safetensors file, a folder of them (with or without an index), or the JSON
    of vLLM before 0.7 and SGLang. Recipes beside them (`config.json`,
    `quantization_config.json`, `hf_quant_config.json`) are checked. Weights are never
    read, whatever else the files hold.

    Args:
      path: the file or the folder.
      num_layers: layers of the model.
      num_kv_heads: KV heads of each layer.
      model_type: the model's family, compared where a file names one.
      fnuz: the file's scales are for float8_e4m3fnuz (ROCm), whose codes are worth
        half of ours: they are doubled.

    Returns:
      The scales, and notes on what a reader of them should know. Layers without scales
      are skipped and named in the notes.

    Raises:
      ScaleError: if anything is missing, damaged, ambiguous, contradictory or meant for
        another model or format.
    """
    path = Path(path)
    if _is_legacy(path):
        found = read_legacy(source_files(path)[0], model_type=model_type, fnuz=fnuz)
    else:
        files = [file for file in source_files(path) if file.suffix != ".json"]
        found = read_safetensors(path, files, num_kv_heads)
    return _assemble(found, num_layers=num_layers, num_kv_heads=num_kv_heads, fnuz=fnuz)


def source_files(path: str | os.PathLike[str]) -> list[Path]:
    """Lists the files that `import_scales` reads for a path, scales first.

    Raises:
      ScaleError: if there are no scales to read.
    """
    path = Path(path)
    if not path.exists():
        raise ScaleError(f"Expected scales in {path}, but there is no such file.")
    if _is_legacy(path):
        legacy = path / LEGACY_FILE if path.is_dir() else path
        if legacy.is_file():
            return [legacy]
        raise ScaleError(
            f"Expected *.safetensors or {LEGACY_FILE} in {path}, found neither."
        )
    scales = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return scales + read_beside(path)


def _is_legacy(path: Path) -> bool:
    if path.is_dir():
        return not any(path.glob("*.safetensors"))
    return path.suffix == ".json"


def import_tensors(
    tensors: Mapping[str, Any],
    *,
    num_layers: int,
    num_kv_heads: int,
    fnuz: bool = False,
) -> tuple[ScaleSet, list[str]]:
    """Reads scales from tensors by name, by the rules and with the errors of files.

    Args:
      tensors: arrays, or numbers; names that aren't those of scales are ignored.
      num_layers, num_kv_heads, fnuz: see `import_scales`.

    Returns:
      The scales and the notes; see `import_scales`.

    Raises:
      ScaleError: see `import_scales`.
    """
    found = Found(where="the tensors")
    for name, values in sorted(tensors.items()):
        match = found.classify(name)
        if match is None or match.role is Role.QUERY:
            continue
        array = as_float32(name, values)
        if match.role is Role.OFFSET:
            found.check_offset(name, is_zero=not array.any())
        else:
            found.add(match, name, array)
    return _assemble(found, num_layers=num_layers, num_kv_heads=num_kv_heads, fnuz=fnuz)


def _assemble(
    found: Found, *, num_layers: int, num_kv_heads: int, fnuz: bool
) -> tuple[ScaleSet, list[str]]:
    _check_names(found)
    notes = [*found.notes, *_notes_on_names(found)]
    table, agreeing = _by_layer(found.scales)
    if agreeing:
        notes.append(f"{agreeing} scales stand there twice, with equal values.")
    _check_pairs(table)
    granularity = _common_granularity(table, found, num_kv_heads)
    factor = np.float32(2.0 if fnuz else 1.0)
    # What overflows here, the check below refuses.
    with np.errstate(over="ignore"):
        pairs = {
            layer: (
                roles[Role.K].values.reshape(-1) * factor,
                roles[Role.V].values.reshape(-1) * factor,
            )
            for layer, roles in table.items()
        }
        result = ScaleSet.from_scales(pairs, granularity=granularity)
    result.check(num_layers=num_layers, num_kv_heads=num_kv_heads)
    if fnuz:
        notes.append(f"Scales are doubled, from {FNUZ_DTYPE} to float8_e4m3fn.")
    missing = sorted(set(range(num_layers)) - set(result.layers))
    if missing:
        notes.append(f"There are no scales for layers {list_layers(missing)}.")
    if all((scale.values == 1).all() for scale in found.scales):
        notes.append(ALL_ONE)
        warnings.warn(ALL_ONE, UserWarning, stacklevel=3)
    return result, notes


ALL_ONE = (
    "Every scale is exactly 1.0: the exporter probably had nothing calibrated, or "
    "raised smaller scales to 1."
)


def _check_names(found: Found) -> None:
    if found.unmatched:
        raise ScaleError(
            f"Expected names of scales such as {spellings.examples()}; found "
            f"{len(found.unmatched)} in {found.where} that look like scales of a KV "
            f"cache and fit none: {shorten(found.unmatched)}."
        )
    if not found.scales:
        raise ScaleError(
            f"Expected scales of a KV cache in {found.where}, found none among "
            f"{found.num_names} names. They look like {spellings.examples()}."
        )


def _notes_on_names(found: Found) -> Iterable[str]:
    single = Counter(
        scale.match.spelling for scale in found.scales if scale.match.role is Role.BOTH
    )
    for spelling, count in single.items():
        yield (
            f"{spelling.tail.rpartition('.')[2]} ({spelling.origin}) is used for K and "
            f"for V in {count} layers."
        )
    if found.num_offsets:
        yield f"{found.num_offsets} zero points are ignored: all of them are 0."
    if found.num_queries:
        yield (
            f"{found.num_queries} scales of queries or probabilities are ignored: no "
            "cache holds these."
        )


type _Table = dict[int, dict[Role, StoredScale]]


def _by_layer(scales: list[StoredScale]) -> tuple[_Table, int]:
    """Sorts scales by layer and role; counts those that stand there twice."""
    table: _Table = defaultdict(dict)
    agreeing = 0
    for scale in scales:
        role = scale.match.role
        for single in (Role.K, Role.V) if role is Role.BOTH else (role,):
            other = table[scale.match.layer].setdefault(single, scale)
            if other is scale:
                continue
            agreeing += 1
            if not np.array_equal(
                other.values.reshape(-1), scale.values.reshape(-1), equal_nan=True
            ):
                raise ScaleError(
                    f"Expected {other.name} and {scale.name} to be equal, since both "
                    f"are the {single.value}_scale of layer {scale.match.layer}, got "
                    f"{other.values.tolist()!s:.60} and {scale.values.tolist()!s:.60}."
                )
    return dict(sorted(table.items())), agreeing


def _check_pairs(table: _Table) -> None:
    for role, partner in ((Role.K, Role.V), (Role.V, Role.K)):
        alone = [layer for layer, roles in table.items() if partner not in roles]
        if alone:
            raise ScaleError(
                f"Expected a scale for {partner.value.upper()} beside each for "
                f"{role.value.upper()}, missing in layers {list_layers(alone)}."
            )


def _common_granularity(table: _Table, found: Found, num_kv_heads: int) -> Granularity:
    layers: dict[Granularity, set[int]] = defaultdict(set)
    for layer, roles in table.items():
        for scale in roles.values():
            shape = scale.values.shape
            layers[granularity_of(scale.name, shape, num_kv_heads)].add(layer)
    if len(layers) > 1:
        raise ScaleError(
            "Expected all scales to be per tensor or all per head, got per tensor in "
            f"layers {list_layers(sorted(layers['tensor']))}, per head in layers "
            f"{list_layers(sorted(layers['head']))}."
        )
    (granularity,) = layers
    promised = found.granularity
    if promised and promised != granularity:
        # With one head the shapes are alike.
        if num_kv_heads == 1:
            return promised
        raise ScaleError(
            f"Expected scales per {promised}, which the recipe beside them promises, "
            f"got scales per {granularity}."
        )
    return granularity
