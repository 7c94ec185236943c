"""Calibration, scales and cached prefixes of an engine on disk, for its next start.

A snapshot is a folder `snapshot-<number>` that appears as a whole or not at all: Orbax
writes the arrays, and one rename puts the finished folder in its place beside the one
before, which is removed after. What a killed writer leaves is hidden and goes with the
next save. The highest number counts.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kv_jax.cache import PagedKVCache
from fp8kv_jax.calibration import CalibrationState, is_scale
from fp8kv_jax.scales.fields import canonical_json, parse_json
from fp8kv_jax.scales.files import LEFTOVER
from fp8kv_jax.serving.engine import Engine
from fp8kv_jax.serving.page_pool import PrefixKey
from pallas_kernels.pages.layout import as_bits, from_bits

_FORMAT = 1
_NAME = re.compile(r"snapshot-(\d+)")
_DESCRIPTION = "snapshot.json"
_ARRAYS = "arrays"
# Beyond the rounding of any device's reciprocal, far below any other error.
_INVERSE_TOLERANCE = 2.0**-20


class SnapshotError(ValueError):
    """A snapshot that cannot be written or must not be used, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What an engine took over.

    Attributes:
      folder: the snapshot.
      tokens_seen: real tokens that its calibration rests on.
      frozen: whether its scales are final.
      num_pages: pages of prefixes; the rest is computed again.
    """

    folder: Path
    tokens_seen: int
    frozen: bool
    num_pages: int


def save_snapshot(
    folder: Path, engine: Engine, *, model: Mapping[str, Any], max_pages: int = 0
) -> Path:
    """Writes a snapshot of an engine between two steps, and removes older ones.

    Args:
      folder: holds the snapshots; made if need be.
      engine: requests under way are not part of it.
      model: what the weights are known by, as JSON; for instance
        `{"weights": fingerprint_weights(params)}`.
      max_pages: pages of cached prefixes to save at most. Inside the window none are:
        they would belong to rows that are not saved.

    Returns:
      The snapshot's own folder.

    Raises:
      SnapshotError: if it cannot be written; earlier ones are left as they were.
    """
    folder = Path(folder).absolute()
    keys = list(engine.pool.published())[:max_pages] if engine.runner.frozen else []
    arrays = _state_arrays(engine.calibration)
    arrays |= _page_arrays(engine, [engine.pool.published()[key] for key in keys])
    description = _describe(engine, model)
    description |= {"prefixes": [key.hex() for key in keys]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _snapshots(folder)
        number = max(earlier, default=0) + 1
        place = folder / f"snapshot-{number:06d}"
        _write(place, arrays, description)
        for path in earlier.values():
            shutil.rmtree(path, ignore_errors=True)
    # Orbax reports what the file system refuses in several types.
    except (OSError, ValueError, RuntimeError) as error:
        raise SnapshotError(
            f"Expected to write a snapshot in {folder}, got {_short(error)}."
        ) from error
    return place


def load_snapshot(
    folder: Path, engine: Engine, *, model: Mapping[str, Any]
) -> Restored | None:
    """Gives an engine without requests the newest snapshot; before `warm_up`.

    Args:
      folder: as of `save_snapshot`.
      engine: its pool may have another number of pages.
      model: must be what was given to `save_snapshot`.

    Returns:
      What was taken over; None if there is no snapshot.

    Raises:
      SnapshotError: if the snapshot is damaged, or belongs to another model, cache or
        calibration. The engine is as it was.
    """
    if engine.has_work:
        raise SnapshotError("Expected an engine without requests, got one at work.")
    found = _snapshots(Path(folder).absolute())
    if not found:
        return None
    place = found[max(found)]
    description = _read_description(place)
    _check_same(place, description, _describe(engine, model))
    # Before Orbax sees them: what it makes of damaged files is no business of ours.
    if _digests(place / _ARRAYS) != description["files"]:
        raise SnapshotError(
            f"Expected the arrays of {place} to be those that were saved, got others: "
            "the snapshot is damaged; remove it."
        )
    arrays = _read_arrays(place)
    calibration = _restore_state(place, engine.calibration, arrays)
    cache = engine.runner.cache
    keys = [bytes.fromhex(key) for key in description["prefixes"]]
    keys = keys[: engine.pool.num_available]
    pages = [engine.pool.take() for _ in keys]
    if pages:
        cache = _restore_pages(cache, pages, arrays)
    engine.runner.replace_state(cache, calibration)
    _publish(engine, pages, keys)
    return Restored(
        folder=place,
        tokens_seen=engine.runner.tokens_seen,
        frozen=engine.runner.frozen,
        num_pages=len(pages),
    )


def _describe(engine: Engine, model: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a snapshot to be of use."""
    config, state = engine.cache_config, engine.calibration
    pools = [(k.dtype.name, v.dtype.name) for k, v in _pools(engine.runner.cache)]
    return {
        "format": _FORMAT,
        "model": dict(model),
        "cache": {
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": config.page_size,
            "pools": ["uint8" if "float8" in k else k for k, _ in pools],
        },
        "calibration": {
            "groups": state.k_scale.shape[1],
            "fp8_layers": list(state.fp8_layers),
            "calibrating_layers": list(state.calibrating_layers),
        },
    }


def _check_same(place: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("format", "model", "cache", "calibration"):
        if found[part] == expected[part]:
            continue
        if part == "format":
            names = [part]
        else:
            both = {*found[part], *expected[part]}
            names = [
                f"{part}.{name}"
                for name in sorted(both)
                if found[part].get(name) != expected[part].get(name)
            ]
        raise SnapshotError(
            f"Expected {place} to be of this engine, got one with another "
            f"{', '.join(names)}."
        )


def _state_arrays(state: CalibrationState) -> dict[str, np.ndarray]:
    """The state's arrays by name, without the window: `state.k_scale` and so on."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(replace(state, staged=None)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        named[f"state.{name}"] = np.asarray(leaf)
    return named


def _restore_state(
    place: Path, like: CalibrationState, arrays: Mapping[str, np.ndarray]
) -> CalibrationState:
    expected = _state_arrays(like)
    empty = {name: own for name, own in expected.items() if not own.size}
    arrays = {**empty, **arrays}
    for name, own in expected.items():
        saved = arrays.get(name)
        if saved is None or (saved.dtype, saved.shape) != (own.dtype, own.shape):
            raise SnapshotError(
                f"Expected {place} to hold {name} as {own.dtype.name}{own.shape}, got "
                f"{'none' if saved is None else f'{saved.dtype.name}{saved.shape}'}."
            )
    for which in "kv":
        scale = arrays[f"state.{which}_scale"]
        inverse = arrays[f"state.{which}_inv_scale"]
        good = is_scale(scale) & is_scale(inverse)
        good &= np.abs(scale.astype(np.float64) * inverse - 1) < _INVERSE_TOLERANCE
        if not good.all():
            rows = np.nonzero(~good.all(axis=1))[0]
            layers = [like.fp8_layers[row] for row in rows]
            raise SnapshotError(
                f"Expected scales of {which.upper()} in {place} that are finite and "
                f"positive, with their reciprocals, got others in layers {layers}."
            )
    frozen = bool(arrays["state.frozen"])
    if not frozen and int(arrays["state.window"]) != int(like.window):
        raise SnapshotError(
            f"Expected {place} to be calibrating over {int(like.window)} tokens, got "
            f"{int(arrays['state.window'])}."
        )
    treedef = jax.tree.structure(replace(like, staged=None))
    state = jax.tree.unflatten(treedef, [jnp.asarray(arrays[n]) for n in expected])
    # Inside the window the engine's own, empty window goes on: rows before are gone,
    # and so are the pages that they belonged to.
    return state if frozen else replace(state, staged=like.staged)


def _pools(cache: PagedKVCache) -> list[tuple[jax.Array, jax.Array]]:
    return list(zip(cache.k_pages, cache.v_pages, strict=True))


def _page_arrays(engine: Engine, pages: list[int]) -> dict[str, np.ndarray]:
    """Bits of some pages by layer: `pages.3.k` and so on; the same on any device."""
    if not pages:
        return {}
    index = jnp.asarray(pages, jnp.int32)
    named = {}
    for layer, (k, v) in enumerate(_pools(engine.runner.cache)):
        for which, pool in (("k", k), ("v", v)):
            named[f"pages.{layer}.{which}"] = np.asarray(as_bits(pool[index]))
    return named


def _restore_pages(
    cache: PagedKVCache, pages: list[int], arrays: Mapping[str, np.ndarray]
) -> PagedKVCache:
    index = jnp.asarray(pages, jnp.int32)

    def put(which: str, pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        saved = [arrays[f"pages.{i}.{which}"][: len(pages)] for i in range(len(pools))]
        return tuple(map(_put_pages, pools, saved, [index] * len(pools)))

    return PagedKVCache(
        k_pages=put("k", cache.k_pages), v_pages=put("v", cache.v_pages)
    )


def _put_pages_in(pool: jax.Array, bits: jax.Array, index: jax.Array) -> jax.Array:
    return pool.at[index].set(from_bits(bits, pool.dtype))


_put_pages = jax.jit(_put_pages_in, donate_argnums=0)


def _publish(engine: Engine, pages: list[int], keys: list[PrefixKey]) -> None:
    """Puts held pages into the index and lets go of them, the ends first."""
    for page, key in zip(pages, keys, strict=True):
        engine.pool.publish(page, key)
    for page in reversed(pages):
        engine.pool.release(page)


def _snapshots(folder: Path) -> dict[int, Path]:
    """Complete snapshots by number."""
    if not folder.is_dir():
        return {}
    found = {}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return found


def _write(
    place: Path, arrays: dict[str, np.ndarray], description: dict[str, Any]
) -> None:
    # Here, since it takes seconds to import.
    import orbax.checkpoint as ocp

    for rest in place.parent.glob(f".snapshot-*{LEFTOVER}*"):
        shutil.rmtree(rest, ignore_errors=True)
    built = place.with_name(f".{place.name}{LEFTOVER}{secrets.token_hex(6)}")
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            # Orbax refuses empty arrays, which a state without FP8 layers has.
            filled = {name: x for name, x in arrays.items() if x.size}
            writer.save(built / _ARRAYS, args=ocp.args.StandardSave(filled))
        sealed = _sealed(description | {"files": _digests(built / _ARRAYS)})
        (built / _DESCRIPTION).write_bytes(sealed)
        _sync(built)
        built.rename(place)
    finally:
        shutil.rmtree(built, ignore_errors=True)
    _sync_one(place.parent)


def _read_arrays(place: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        restored = reader.restore(place / _ARRAYS)
    return {name: np.asarray(values) for name, values in restored.items()}


def _digests(folder: Path) -> dict[str, str]:
    """Hashes every file in a folder, by its path there."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            digests[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return digests


def _sealed(description: dict[str, Any]) -> bytes:
    """The description with a digest of itself."""
    body = canonical_json(description)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return canonical_json({"body": description, "sha256": seal}).encode()


def _read_description(place: Path) -> dict[str, Any]:
    path = place / _DESCRIPTION
    try:
        sealed = parse_json(path.read_bytes(), str(path))
        body = sealed["body"]
        seal = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        if seal == sealed["sha256"]:
            return body
        reason = "one that was changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = _short(error)
    raise SnapshotError(
        f"Expected {path} to describe the snapshot, got {reason}: remove the snapshot."
    )


def _sync(folder: Path) -> None:
    """Makes a folder and all in it survive a power cut."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync_one(Path(root) / name)
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    lines = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
    )
