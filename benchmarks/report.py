"""One run's results and what they were measured on, as JSON and back."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from benchmarks.timing import Ceilings

VERSION = 1
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "torch")
ROOT = pathlib.Path(__file__).parent.parent


class ReportError(ValueError):
    """A file that is no report of ours, or one that cannot be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was measured, where, when and on which code.

    Attributes:
      device: kind of the device, as JAX names it.
      driver: version of the GPU's driver, None without one.
      versions: of the packages that matter.
      commit: of the working tree, with "+" if it had changes; None outside of git.
      date: when the run started, UTC.
      small: whether the shapes were those for a machine without a GPU.
      ceilings: of the device, measured in this run.
      seconds: how long each benchmark took, in the order they ended; the first one
        with what came before it, the others from the end of the one before.
      rows: results; each names its `benchmark`.
      skipped: why a benchmark, or a part of one, did not run.
      failed: what went wrong in which benchmark.
    """

    device: str
    driver: str | None
    versions: dict[str, str]
    commit: str | None
    date: str
    small: bool
    ceilings: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def begin_report(ceilings: Ceilings, *, small: bool) -> Report:
    """Makes a report without results on this machine and this code."""
    now = datetime.datetime.now(datetime.UTC)
    return Report(
        device=jax.devices()[0].device_kind,
        driver=_driver(),
        versions={"python": platform.python_version()} | _versions(),
        commit=_commit(),
        date=now.isoformat(timespec="seconds"),
        small=small,
        ceilings=ceilings._asdict(),
    )


def write_report(report: Report, path: pathlib.Path) -> None:
    """Writes a report as JSON, to a temporary name first."""
    text = json.dumps({"version": VERSION} | asdict(report), indent=1) + "\n"
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        file.write(text)
    pathlib.Path(file.name).chmod(0o644)
    os.replace(file.name, path)


def read_report(path: pathlib.Path) -> Report:
    """Reads what `write_report` wrote.

    Raises:
      ReportError: if the file is none, or of another version.
    """
    try:
        fields = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"Expected a report of ours in {path}: {error}.") from error
    version = fields.pop("version", None) if isinstance(fields, dict) else None
    if version != VERSION:
        raise ReportError(f"Expected a report of version {VERSION} in {path}.")
    try:
        return Report(**fields)
    except TypeError as error:
        raise ReportError(f"Expected the fields of a report in {path}.") from error


def microseconds(row: dict[str, Any]) -> float:
    """The time of a row: by the wall where it was taken, else the device's."""
    return row["wall_us"] if "wall_us" in row else row["device_us"]


def derived(report: Report) -> list[dict[str, Any]]:
    """Rows with what follows from them and the rest of the report.

    Adds `percent_of_ceiling`, for a wall time also its inverse `over_limit`;
    `kv_over_limit`, of append and attention alone; `times_xla` and `times_bf16`, how many times as long the same
    case takes by the plain JAX implementation and over BF16 pools.
    """
    by_key = {_key(row): row for row in report.rows}
    return [row | _ratios(row, by_key, report.ceilings) for row in report.rows]


def _key(row: dict[str, Any], **changes: str) -> tuple[str, ...]:
    row = row | changes
    return tuple(row[k] for k in ("benchmark", "op", "case", "implementation"))


def _ratios(
    row: dict[str, Any], by_key: dict[tuple[str, ...], dict], ceilings: dict[str, float]
) -> dict[str, float]:
    found = {}
    for rate in ("gb_per_s", "tflop_per_s"):
        if rate in row:
            found["percent_of_ceiling"] = 100 * row[rate] / ceilings[rate]
            if "wall_us" in row:
                found["over_limit"] = ceilings[rate] / row[rate]
    if "append_attention_us" in row:
        kv_us = row["kv_bytes"] / ceilings["gb_per_s"] / 1e3
        found["kv_over_limit"] = row["append_attention_us"] / kv_us
    baselines = {
        "times_xla": _key(row, implementation="xla"),
        "times_bf16": _key(row, case=f"{row['case']}-bf16"),
    }
    for name, key in baselines.items():
        if key in by_key and by_key[key] is not row and key != _key(row):
            found[name] = microseconds(by_key[key]) / microseconds(row)
    return found


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output_of(query)
    return lines.splitlines()[0] if lines else None


def _commit() -> str | None:
    commit = _output_of(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return None
    changes = _output_of(["git", "-C", str(ROOT), "status", "--porcelain"])
    return f"{commit}+" if changes else commit


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
