"""Files and folders that appear as a whole or not at all, whenever the process dies."""

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from fp8kv_jax.scales.scale_set import ScaleError

# What a killed writer leaves beside the place it meant; safe to delete.
LEFTOVER = ".tmp-"


def write_file(path: Path, data: bytes) -> None:
    """Replaces a file: readers see the old bytes or the new, also after a crash.

    Raises:
      OSError: if the file system refuses.
    """
    built = _beside(path)
    try:
        _write_synced(built, data)
        built.replace(path)
    finally:
        built.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_folder(
    folder: Path, files: Mapping[str, bytes], *, replaces: bool = False
) -> None:
    """Makes a folder of files, and its parents.

    Args:
      folder: where.
      files: bytes by name.
      replaces: whether a folder that is there gives way, by two renames: a reader may
        find nothing between them, but never a part.

    Raises:
      ScaleError: if something is there and does not give way.
      OSError: if the file system refuses.
    """
    folder = folder.absolute()
    if not replaces:
        _refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    built = _beside(folder)
    built.mkdir()
    try:
        for name, data in files.items():
            _write_synced(built / name, data)
        _sync_folder(built)
        if replaces:
            remove_folder(folder)
        _refuse_existing(folder)
        try:
            built.rename(folder)
        except OSError:  # another writer came first
            _refuse_existing(folder)
            raise
    finally:
        shutil.rmtree(built, ignore_errors=True)
    _sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Deletes a folder: it is gone at once, its files a little later."""
    away = _beside(folder)
    try:
        folder.rename(away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file; a line that a crash cut off stays a line of its own.

    Raises:
      OSError: if the file system refuses.
    """
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        _sync(file)
    _sync_folder(path.parent)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{LEFTOVER}{secrets.token_hex(6)}")


def _refuse_existing(folder: Path) -> None:
    if os.path.lexists(folder):
        raise ScaleError(f"Expected {folder} not to exist, got something there.")


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        _sync(file)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
