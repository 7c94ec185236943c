"""Reads the scales that files hold, each as it stands there, before they are judged."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from fp8kv_jax.calibration import Granularity
from fp8kv_jax.scales import spellings
from fp8kv_jax.scales.digest import DIGEST_KEY, digest_tensors
from fp8kv_jax.scales.recipes import check_recipe
from fp8kv_jax.scales.scale_set import ScaleError
from fp8kv_jax.scales.spellings import Match, Role

_RECIPE_FILES = ("config.json", "quantization_config.json", "hf_quant_config.json")
LEGACY_FILE = "kv_cache_scales.json"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# safetensors' names of the same. Its reader for numpy has no other floats.
_STORED_FLOATS = ("F16", "BF16", "F32", "F64")
FNUZ_DTYPE = "float8_e4m3fnuz"
_FP8_DTYPES = ("float8_e4m3fn", "fp8_e4m3", "fp8", FNUZ_DTYPE)


@dataclass(frozen=True, kw_only=True)
class StoredScale:
    """One tensor: its name for messages, and float32 values in the file's shape."""

    match: Match
    name: str
    values: np.ndarray


@dataclass(kw_only=True)
class Found:
    """What the files hold, before it is judged as a whole."""

    where: str
    scales: list[StoredScale] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    num_names: int = 0
    num_offsets: int = 0
    num_queries: int = 0
    granularity: Granularity | None = None
    notes: list[str] = field(default_factory=list)

    def classify(self, name: str) -> Match | None:
        """Matches a name, and remembers it if it only looks like one of ours."""
        self.num_names += 1
        match = spellings.match_name(name)
        if match is None:
            if spellings.looks_like_kv_scale(name):
                self.unmatched.append(name)
        elif match.role is Role.QUERY:
            self.num_queries += 1
        return match

    def check_offset(self, name: str, *, is_zero: bool) -> None:
        if not is_zero:
            raise ScaleError(
                f"Expected the zero point {name} to be 0, that of a symmetric cache: "
                "its scale can't be used without it."
            )
        self.num_offsets += 1

    def add(self, match: Match, name: str, values: np.ndarray) -> None:
        self.scales.append(StoredScale(match=match, name=name, values=values))


def read_beside(path: Path) -> list[Path]:
    """Lists the recipes and the index that are read with safetensors files."""
    folder = path if path.is_dir() else path.parent
    names = (*_RECIPE_FILES, _INDEX) if path.is_dir() else _RECIPE_FILES
    return [folder / name for name in names if (folder / name).is_file()]


def read_safetensors(path: Path, files: list[Path], num_kv_heads: int) -> Found:
    """Reads the scales of safetensors files, and what JSON files say about them."""
    found = Found(where=path.name or str(path))
    beside = {file.name: _read_json(file) for file in read_beside(path)}
    index = beside.pop(_INDEX, None)
    # First: it tells of a format whose tensors would only look wrong.
    for name, contents in beside.items():
        found.granularity = check_recipe(contents, where=name) or found.granularity
    names: dict[Path, set[str]] = {}
    for file in files:
        names[file] = _read_file(file, found, num_kv_heads, tell_file=len(files) > 1)
    if index is not None:
        _check_index(index, path, names)
    return found


def _read_file(
    file: Path, found: Found, num_kv_heads: int, *, tell_file: bool
) -> set[str]:
    """Reads the scales of one file, and returns all names in it."""
    read: dict[str, np.ndarray] = {}
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            names = set(opened.keys())
            for name in sorted(names):
                match = found.classify(name)
                shown = f"{name} in {file.name}" if tell_file else name
                if match is None or match.role is Role.QUERY:
                    continue
                if match.role is Role.OFFSET:
                    found.check_offset(shown, is_zero=_is_zero(file, name))
                    continue
                _check_stored(opened.get_slice(name), shown, num_kv_heads)
                read[name] = opened.get_tensor(name)
                found.add(match, shown, as_float32(shown, read[name]))
            digest = (opened.metadata() or {}).get(DIGEST_KEY)
    except (safetensors.SafetensorError, OSError) as error:
        raise ScaleError(
            f"Expected {file.name} to be a whole safetensors file ({error})."
        ) from None
    if digest is not None and digest != digest_tensors(read):
        raise ScaleError(
            f"Expected the scales in {file.name} to have the digest {digest[:12]}... of "
            f"its metadata, got {digest_tensors(read)[:12]}...: the file is damaged."
        )
    return names


def _check_stored(stored: Any, name: str, num_kv_heads: int) -> None:
    """Judges a tensor before it is read: a wrong one may be of any size."""
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if dtype not in _STORED_FLOATS:
        raise ScaleError(
            f"Expected {name} to be of type {', '.join(_STORED_FLOATS)}, got {dtype}."
        )
    granularity_of(name, shape, num_kv_heads)


def _is_zero(file: Path, name: str) -> bool:
    """Says whether a tensor of any type is all zeros, without decoding it.

    compressed-tensors keeps zero points in FP8, which the reader for numpy lacks.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(length))[name]
        first, last = entry["data_offsets"]
        opened.seek(8 + length + first)
        data = opened.read(last - first)
    negative_zero = b"\x80" if entry["dtype"].startswith("F8_E") else b""
    return not data.strip(b"\0" + negative_zero)


def _check_index(
    index: Mapping[str, Any], path: Path, names: Mapping[Path, set[str]]
) -> None:
    places = index.get("weight_map")
    if not isinstance(places, dict):
        raise ScaleError(f"Expected a weight_map in {_INDEX}, found none.")
    lost = sorted(
        f"{name} in {file}"
        for name, file in places.items()
        if spellings.match_name(name) and name not in names.get(path / str(file), ())
    )
    if lost:
        raise ScaleError(
            f"Expected the scales that {_INDEX} promises, missing: {shorten(lost)}."
        )


def read_legacy(file: Path, *, model_type: str | None, fnuz: bool) -> Found:
    """Reads the JSON of vLLM before 0.7 and SGLang, whose ranks have to agree."""
    contents = _read_json(file)
    cache = contents.get("kv_cache")
    ranks = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(ranks, dict) or not ranks:
        raise ScaleError(
            f"Expected kv_cache.scaling_factor in {file.name} to map ranks to layers "
            "to numbers, found none."
        )
    _check_legacy_header(contents, file.name, model_type=model_type, fnuz=fnuz)
    found = Found(where=file.name)
    by_rank = {rank: _read_rank(rank, layers) for rank, layers in ranks.items()}
    first, values = next(iter(by_rank.items()))
    for rank, others in by_rank.items():
        _check_same_rank(first, values, rank, others)
    for layer, value in values.items():
        match = Match(layer=layer, role=Role.BOTH, spelling=_LEGACY)
        found.add(match, f"scaling_factor {first}.{layer}", value)
    found.num_names = len(values)
    if len(by_rank) > 1:
        found.notes.append(f"All {len(by_rank)} ranks have the same scales.")
    return found


_LEGACY = spellings.Spelling("the JSON of vLLM before 0.7", "scaling_factor", Role.BOTH)


def _check_legacy_header(
    contents: Mapping[str, Any], name: str, *, model_type: str | None, fnuz: bool
) -> None:
    dtype = contents["kv_cache"].get("dtype")
    if dtype not in _FP8_DTYPES:
        raise ScaleError(
            f"Expected kv_cache.dtype in {name} to be 'float8_e4m3fn', got {dtype!r}."
        )
    if dtype == FNUZ_DTYPE and not fnuz:
        raise ScaleError(
            f"Expected fnuz to be asked for, since {name} holds scales for "
            f"{FNUZ_DTYPE}: they have to be doubled."
        )
    found = contents.get("model_type")
    # A text-only decoder adds a word to its family's name.
    if model_type and found and str(found).removesuffix("_text") != model_type:
        raise ScaleError(
            f"Expected model_type {model_type!r} in {name}, got {found!r}: another "
            "model's scales?"
        )


def _read_rank(rank: str, layers: Any) -> dict[int, np.ndarray]:
    if not isinstance(layers, dict) or not layers:
        raise ScaleError(
            f"Expected scaling_factor {rank} to map layers to numbers, got "
            f"{layers!r:.40}."
        )
    values = {}
    for layer, value in layers.items():
        if re.fullmatch(spellings.INDEX, layer) is None:
            raise ScaleError(
                f"Expected the layers of scaling_factor {rank} to be numbers from 0 "
                f"on, got {layer!r:.40}."
            )
        name = f"scaling_factor {rank}.{layer}"
        if isinstance(value, list | dict):
            raise ScaleError(f"Expected {name} to be a number, got {value!r:.40}.")
        values[int(layer)] = as_float32(name, value)
    return values


def _check_same_rank(
    first: str, wanted: dict[int, np.ndarray], rank: str, got: dict[int, np.ndarray]
) -> None:
    unlike = sorted(
        layer
        for layer in wanted.keys() | got.keys()
        if not np.array_equal(wanted.get(layer, ()), got.get(layer, ()), equal_nan=True)
    )
    if unlike:
        raise ScaleError(
            f"Expected ranks {first} and {rank} to have the same scales, but they "
            f"differ in layers {list_layers(unlike)}: each is for its own part of the KV "
            "heads, and the file doesn't say which."
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        contents = json.loads(
            file.read_text(encoding="utf-8"), object_pairs_hook=_unique
        )
    except (ValueError, RecursionError, OSError) as error:
        raise ScaleError(f"Expected {file.name} to be valid JSON ({error}).") from None
    if not isinstance(contents, dict):
        raise ScaleError(f"Expected {file.name} to hold a JSON object.")
    return contents


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python's reader takes the last of two equal keys; here neither can be trusted.
    repeated = [
        key for key, count in Counter(key for key, _ in pairs).items() if count > 1
    ]
    if repeated:
        raise ValueError(f"{repeated[0]!r:.40} stands there twice")
    return dict(pairs)


def as_float32(name: str, values: Any) -> np.ndarray:
    if isinstance(values, int) and not isinstance(values, bool):
        values = _to_float(values)
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.name not in _FLOATS:
        got = array.dtype.name if array.shape else repr(values)
        raise ScaleError(f"Expected {name} to be floating point, got {got:.40}.")
    with np.errstate(over="ignore", under="ignore"):
        # What float32 can't hold becomes Inf or 0, and is refused as such.
        return array.astype(np.float32)


def _to_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def granularity_of(name: str, shape: tuple[int, ...], num_kv_heads: int) -> Granularity:
    if shape in ((), (1,), (1, 1), (1, 1, 1)):
        return "tensor"
    heads = num_kv_heads
    if shape in ((heads,), (heads, 1), (heads, 1, 1)):
        return "head"
    raise ScaleError(
        f"Expected {name} to be of shape (), (1,), ({heads},) or ({heads}, 1, 1), one "
        f"scale or one for each of the model's {heads} KV heads, got {shape}."
    )


def list_layers(layers: Iterable[int]) -> str:
    return shorten([str(layer) for layer in layers], limit=12)


def shorten(names: list[str], *, limit: int = 6) -> str:
    shown = ", ".join(" ".join(name.split())[:120] for name in names[:limit])
    left = len(names) - limit
    return f"{shown} and {left} more" if left > 0 else shown
