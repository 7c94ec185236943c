"""The state of a calibration run on disk, so that a killed run goes on where it was.

Orbax marks a save as complete when it is: one that a kill cut short is not found, and
its rest is removed.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp8kv_jax.scales.fields import canonical_json, parse_json
from fp8kv_jax.scales.files import LEFTOVER, write_file
from fp8kv_jax.scales.statistics import AmaxState

_DESCRIPTION = "run.json"
_STATES = "states"
# The newest one, and the one before it until the newest is complete.
_KEPT = 2


def fingerprint(description: Mapping[str, Any]) -> bytes:
    """Hashes what a run depends on: 32 bytes."""
    return hashlib.sha256(canonical_json(description).encode()).digest()


class StateStore:
    """A folder with the newest states of one run.

    One process writes it. Close it, or use it as a context.

    Args:
      folder: made if need be. What it holds of the same run is gone on with.
      description: what the run depends on, by name; JSON.
      fresh: removes what the folder holds of any run first.

    Raises:
      ValueError: if the folder holds another run, or something else.
    """

    def __init__(
        self, folder: Path, description: Mapping[str, Any], *, fresh: bool = False
    ) -> None:
        # Here, since it takes seconds and few commands need it.
        import orbax.checkpoint as ocp

        self.folder = folder.absolute()
        if fresh:
            self.remove()
        _claim(self.folder, description)
        self._arguments = ocp.args
        self._manager = ocp.CheckpointManager(
            self.folder / _STATES,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT,
                create=False,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=0, active_processes={0}
                ),
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._manager.close()

    def load(self, like: AmaxState) -> AmaxState | None:
        """Reads the newest state, None if there is none.

        Args:
          like: a state of the same run.

        Raises:
          ValueError: if the state is damaged.
        """
        newest = self._manager.latest_step()
        if newest is None:
            return None
        restore = self._arguments.StandardRestore(like)
        try:
            state = self._manager.restore(newest, args=restore)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected a whole state in {self.folder}, got a damaged one "
                f"({type(error).__name__}): use --no-resume to start over."
            ) from error
        assert isinstance(state, AmaxState)
        return state

    def save(self, state: AmaxState) -> None:
        """Writes a state; it is there for good when this returns."""
        save = self._arguments.StandardSave(state)
        self._manager.save(int(state.next_batch), args=save, force=True)

    def remove(self) -> None:
        """Removes what a run left in the folder, and the folder if that is all."""
        if not (self.folder / _DESCRIPTION).exists():
            return
        shutil.rmtree(self.folder / _STATES, ignore_errors=True)
        (self.folder / _DESCRIPTION).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _claim(folder: Path, description: Mapping[str, Any]) -> None:
    """Marks a folder as this run's, or checks that it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ValueError(
            f"Expected a folder for the running state, got {folder}: {error.strerror}."
        ) from None
    file = folder / _DESCRIPTION
    if not file.exists():
        strangers = [name for name in found if LEFTOVER not in name]
        if strangers:
            raise ValueError(
                f"Expected {folder} to be a new folder or one of a calibration run, "
                f"got one with {strangers[0]}: name another."
            )
        write_file(file, canonical_json(description).encode())
    (folder / _STATES).mkdir(exist_ok=True)
    before = parse_json(file.read_bytes(), str(file))
    names = sorted({*before, *description})
    changed = [name for name in names if before.get(name) != description.get(name)]
    if changed:
        raise ValueError(
            f"Expected {folder} to hold the state of this run, got one with another "
            f"{', '.join(changed)}: use --no-resume to start over, or another folder."
        )
