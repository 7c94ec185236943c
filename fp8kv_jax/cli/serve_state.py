"""What `fp8kv serve` reads at its start and keeps for the next: key, prompts, snapshots."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8kv_jax.cli.errors import UserError, checking_input, print_warning

if TYPE_CHECKING:
    from fp8kv_jax.serving import Engine
    from fp8kv_jax.serving.snapshot import Restored
    from models.loading import LoadedModel

KEY_VARIABLE = "FP8KV_API_KEY"
_MAX_KEY_BYTES = 4096
# A text of more bytes counts as several prompts.
_PROMPT_BYTES = 16_384
# Far more than any window takes.
_MAX_PROMPTS = 4096


def read_key(path: Path | None) -> str | None:
    """Reads the API key from a file, or else from the environment.

    Raises:
      UserError: if it cannot be read, is empty, or no visible ASCII.
    """
    if path is None:
        key, source = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if key is None:
            return None
    else:
        source = "--api-key-file"
        try:
            with path.open("rb") as file:
                key = file.read(_MAX_KEY_BYTES + 1).decode("latin-1").strip()
        except OSError as error:
            raise UserError(
                f"Expected --api-key-file to name a readable file, got {path}: "
                f"{error.strerror}."
            ) from None
    visible = key.isascii() and key.isprintable() and " " not in key
    if not key or not visible or len(key) > _MAX_KEY_BYTES:
        raise UserError(
            f"Expected {source} to hold one key of visible ASCII characters, at most "
            f"{_MAX_KEY_BYTES}, got something else."
        )
    return key


def read_calibration_prompts(path: Path, model: "LoadedModel") -> list[list[int]]:
    """Reads prompts in the forms that `fp8kv calibrate --data` takes.

    Raises:
      UserError: if there is none, or the file is not what it should be.
    """
    from fp8kv_jax.scales.corpus import (
        DataSource,
        SourceRecord,
        load_passage,
        read_passages,
    )

    tokenizer = model.tokenizer
    prompts: list[list[int]] = []
    with checking_input():
        record = SourceRecord(source=DataSource(class_name="prompts", path=path))
        for passage in read_passages(record, max_bytes=_PROMPT_BYTES):
            content = load_passage(passage)
            if not isinstance(content, str):
                content = tokenizer.apply_chat_template(content)
            ids = tokenizer.encode(content)
            if ids:
                prompts.append(ids)
            if len(prompts) >= _MAX_PROMPTS:
                break
    if not prompts:
        raise UserError(f"Expected {path} to hold prompts, got none.")
    return prompts


class Snapshots:
    """Where a server starts from, and what it leaves.

    Args:
      folder: holds the snapshots.
      model: what must be the same for a snapshot to be of use.
      max_pages: pages of cached prefixes that the last one holds.
    """

    def __init__(
        self, folder: Path, *, model: Mapping[str, Any], max_pages: int
    ) -> None:
        self._folder = folder
        self._model = model
        self._max_pages = max_pages
        self._error: str | None = None

    def load(self, engine: "Engine") -> "Restored | None":
        """Restores the newest snapshot, if there is one.

        Raises:
          UserError: if it is damaged, or another model's or cache's.
        """
        from fp8kv_jax.serving.snapshot import load_snapshot

        with checking_input():
            return load_snapshot(self._folder, engine, model=self._model)

    def save_at_freeze(self, engine: "Engine") -> None:
        """Saves the scales; a server that is killed later starts with them."""
        self._save(engine, 0)
        if self._error is not None:
            print_warning(self._error)

    def save_at_end(self, engine: "Engine") -> None:
        self._save(engine, self._max_pages)

    def check_saved(self) -> None:
        """Raises a UserError if the newest snapshot could not be written."""
        if self._error is not None:
            raise UserError(self._error)

    def _save(self, engine: "Engine", max_pages: int) -> None:
        from fp8kv_jax.serving.snapshot import SnapshotError, save_snapshot

        self._error = None
        try:
            save_snapshot(self._folder, engine, model=self._model, max_pages=max_pages)
        except SnapshotError as error:
            self._error = str(error)
