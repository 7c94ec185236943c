"""A folder of artifacts, of which one is live: promote, roll back, remove."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fp8kv_jax.scales.artifact import (
    copy_artifact,
    is_artifact,
    naming,
    read_artifact,
)
from fp8kv_jax.scales.fields import (
    ArtifactId,
    Checked,
    Count,
    Limits,
    UtcTime,
    decode,
    parse_json,
)
from fp8kv_jax.scales.files import LEFTOVER, append_line, remove_folder, write_file
from fp8kv_jax.scales.manifest import Manifest, utc_now
from fp8kv_jax.scales.scale_set import ScaleError

_LIVE, _HISTORY, _LOCK = "live", "history.jsonl", ".lock"
_NAME = Annotated[
    str, Limits(pattern="[0-9a-f]{4,16}", meaning="an artifact id, or its beginning")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Checked):
    """A change of what is live, one line of the history.

    Attributes:
      number: counts changes, from 1 on.
      action: what was asked for.
      artifact_id: what is live after it; None for nothing.
      back: number of the change that a rollback returns to; 0 for nothing live.
      at: when.
    """

    number: Count
    action: Literal["promote", "rollback", "remove"]
    artifact_id: ArtifactId | None
    back: Count
    at: UtcTime


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An artifact of a registry.

    Attributes:
      artifact_id: its id.
      live: whether it is what loops load.
      previous: whether a rollback would make it live.
      manifest: what it is; None if it cannot be read.
      problem: why not.
    """

    artifact_id: str
    live: bool
    previous: bool
    manifest: Manifest | None
    problem: str | None


class Registry:
    """A folder with an artifact in each sub-folder, named by its id.

    `live` holds the newest change and is swapped as a whole, after `history.jsonl` has
    got the same line: a change counts once `live` says so, so a writer that is killed
    at any point leaves the old state or the new. Readers take no lock; writers wait
    for each other (an advisory lock that ends with its process, on one host or on a
    file system that shares locks).

    Args:
      folder: need not exist until something is added.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def add(self, artifact: str | os.PathLike[str]) -> str:
        """Copies an artifact into the registry; one that is there already stays.

        Returns:
          Its id.

        Raises:
          ScaleError: as `read_artifact` does.
          OSError: if the file system refuses.
        """
        source = Path(artifact)
        artifact_id = read_artifact(source)[1].artifact_id
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._writing():
            target = self.folder / artifact_id
            if not target.exists():
                copy_artifact(source, target)
            read_artifact(target)
        return artifact_id

    def list(self) -> tuple[Entry, ...]:
        """Every artifact, newest first; those that cannot be read come last.

        Raises:
          ScaleError: if the live pointer is damaged.
        """
        live = self._live()
        previous = None
        with contextlib.suppress(ScaleError):  # damaged history hides no artifact
            previous = self._before(live)
        entries = []
        for artifact_id in self._ids():
            manifest, problem = None, None
            try:
                manifest = self._read(artifact_id)
            except ScaleError as error:
                problem = str(error)
            entries.append(
                Entry(
                    artifact_id=artifact_id,
                    live=live is not None and artifact_id == live.artifact_id,
                    previous=previous is not None
                    and artifact_id == previous.artifact_id,
                    manifest=manifest,
                    problem=problem,
                )
            )
        return tuple(sorted(entries, key=_age, reverse=True))

    def live_id(self) -> str | None:
        """Id of the live artifact; None if nothing is live.

        Raises:
          ScaleError: if the live pointer is damaged.
        """
        live = self._live()
        return live.artifact_id if live else None

    def live_folder(self) -> Path:
        """The folder of the live artifact, for `read_artifact`.

        Raises:
          ScaleError: if nothing is live, or the live pointer is damaged.
        """
        artifact_id = self.live_id()
        if artifact_id is None:
            raise ScaleError(
                f"Expected a live artifact in {self.folder}, got none: promote one."
            )
        return self.folder / artifact_id

    def history(self) -> tuple[Change, ...]:
        """All changes that took effect, oldest first.

        Raises:
          ScaleError: if the live pointer or the history is damaged.
        """
        live = self._live()
        number = live.number if live else 0
        changes = self._changes()
        return tuple(self._change(changes, n) for n in range(1, number + 1))

    def promote(self, name: str) -> str:
        """Makes an artifact live, after it was read and checked once more.

        Args:
          name: its id, or the first digits of it, 4 at least.

        Returns:
          Its id.

        Raises:
          ScaleError: if there is no such artifact, or it cannot be read.
          OSError: if the file system refuses.
        """
        with self._writing():
            artifact_id = self.resolve(name)
            self._read(artifact_id)
            live = self._live()
            if live is None or live.artifact_id != artifact_id:
                self._swap(live, "promote", artifact_id, back=_return_point(live))
        return artifact_id

    def rollback(self) -> str:
        """Makes the artifact live that was so before the live one was promoted.

        Doing it twice goes back by two: after promoting A, B and C, it gives B and
        then A.

        Returns:
          The id of what is live now.

        Raises:
          ScaleError: if there is nothing to go back to, or it cannot be read.
          OSError: if the file system refuses.
        """
        with self._writing():
            live = self._live()
            target = self._before(live)
            if target is None or target.artifact_id is None:
                raise ScaleError(
                    f"Expected an artifact that was live before in {self.folder}, to "
                    "roll back to, got none."
                )
            self._read(target.artifact_id)
            self._swap(live, "rollback", target.artifact_id, back=target.back)
        return target.artifact_id

    def remove(self, name: str, *, force: bool = False) -> str:
        """Deletes an artifact, but not what is live nor what a rollback needs.

        Args:
          name: its id, or the first digits of it.
          force: deletes it all the same. If it was live, nothing is live then.

        Returns:
          Its id.

        Raises:
          ScaleError: if there is no such artifact, or it is needed.
          OSError: if the file system refuses.
        """
        with self._writing():
            artifact_id = self.resolve(name)
            live = self._live()
            is_live = live is not None and live.artifact_id == artifact_id
            if not force:
                self._refuse_needed(artifact_id, live)
            if live is not None and is_live:
                self._swap(live, "remove", None, back=live.back)
            remove_folder(self.folder / artifact_id)
        return artifact_id

    def resolve(self, name: str) -> str:
        """Finds the id that begins with some digits.

        Raises:
          ScaleError: if none does, or several do.
        """
        decode(_NAME, name, "the name of an artifact")
        found = [full for full in self._ids() if full.startswith(name)]
        if len(found) != 1:
            known = ", ".join(self._ids()) or "none"
            raise ScaleError(
                f"Expected one artifact {name} in {self.folder}, got {len(found)}; "
                f"there are {known}."
            )
        return found[0]

    def _refuse_needed(self, artifact_id: str, live: Change | None) -> None:
        previous = self._before(live)
        for change, use in ((live, "is live"), (previous, "is what a rollback needs")):
            if change is not None and change.artifact_id == artifact_id:
                raise ScaleError(
                    f"Expected an artifact that nothing needs, got {artifact_id}, "
                    f"which {use}."
                )

    def _ids(self) -> tuple[str, ...]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ScaleError(
                f"Expected {self.folder} to be a folder of artifacts, got "
                f"{error.strerror}."
            ) from None
        return tuple(name for name in names if _ID.fullmatch(name))

    def _read(self, artifact_id: str) -> Manifest:
        folder = self.folder / artifact_id
        _, manifest = read_artifact(folder)
        if manifest.artifact_id != artifact_id:
            raise ScaleError(
                f"{folder}: expected the artifact of this name, got "
                f"{manifest.artifact_id}."
            )
        return manifest

    def _live(self) -> Change | None:
        path = self.folder / _LIVE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ScaleError(
                f"Expected {path} to be a readable file, got {error.strerror}."
            ) from None
        with naming(path):
            change = decode(Change, parse_json(data, "it"), "live")
        return change

    def _before(self, live: Change | None) -> Change | None:
        """The change that a rollback of `live` returns to."""
        if live is None or not live.back:
            return None
        return self._change(self._changes(), live.back)

    def _change(self, changes: dict[int, Change], number: int) -> Change:
        if number not in changes:
            raise ScaleError(
                f"Expected change {number} in {self.folder / _HISTORY}, got none: the "
                "file was damaged or removed."
            )
        return changes[number]

    def _changes(self) -> dict[int, Change]:
        """Changes by number. Of two with one number, the first never took effect."""
        try:
            lines = (self.folder / _HISTORY).read_bytes().split(b"\n")
        except OSError:
            return {}
        changes = {}
        for line in lines:
            # A line that a crash cut off never took effect either.
            with contextlib.suppress(ScaleError):
                change = decode(Change, parse_json(line, _HISTORY), _HISTORY)
                changes[change.number] = change
        return changes

    def _swap(
        self,
        live: Change | None,
        action: Literal["promote", "rollback", "remove"],
        artifact_id: str | None,
        *,
        back: int,
    ) -> None:
        change = Change(
            number=live.number + 1 if live else 1,
            action=action,
            artifact_id=artifact_id,
            back=back,
            at=utc_now(),
        )
        line = json.dumps(dataclasses.asdict(change))
        append_line(self.folder / _HISTORY, line)
        write_file(self.folder / _LIVE, line.encode() + b"\n")

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Waits until no other writer is at work; clears up after killed ones."""
        if not self.folder.is_dir():
            raise ScaleError(f"Expected {self.folder} to be a folder of artifacts.")
        with (self.folder / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in self.folder.glob(f".*{LEFTOVER}*"):
                if not _LEFTOVER.match(leftover.name):
                    continue
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
            yield


_ID = re.compile("[0-9a-f]{16}")
# What only writers with the lock leave: others may be building beside them.
_LEFTOVER = re.compile(rf"\.([0-9a-f]{{16}}|{_LIVE}){LEFTOVER}")


def _return_point(live: Change | None) -> int:
    """Where a rollback of the next promotion goes; over a removal to what was before."""
    if live is None:
        return 0
    return live.back if live.artifact_id is None else live.number


def _age(entry: Entry) -> tuple[str, str]:
    created_at = entry.manifest.created_at if entry.manifest else ""
    return created_at, entry.artifact_id


def find_artifact(path: str | os.PathLike[str]) -> Path:
    """The artifact that a path means: itself, or the live one of a registry.

    Raises:
      ScaleError: if it is neither.
    """
    folder = Path(path)
    if is_artifact(folder):
        return folder
    if (folder / _LIVE).is_file():
        return Registry(folder).live_folder()
    raise ScaleError(
        f"Expected {folder} to be an artifact (a folder with manifest.json and "
        "scales.safetensors) or a registry with a live one."
    )
