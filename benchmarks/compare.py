"""Which results of a run are slower than those of an older one."""

from typing import Any, NamedTuple

from benchmarks.report import Report, ReportError, microseconds


class Change(NamedTuple):
    """One result of both runs; `ratio` above 1 is slower than before."""

    benchmark: str
    op: str
    case: str
    implementation: str
    old_us: float
    new_us: float

    @property
    def ratio(self) -> float:
        return self.new_us / self.old_us


class Comparison(NamedTuple):
    """What two runs of one kind of device have in common, and what only the old has."""

    changes: list[Change]
    missing: list[tuple[str, ...]]

    def regressions(self, threshold: float) -> list[Change]:
        """Results that take more than `threshold` times what they took."""
        return [change for change in self.changes if change.ratio > threshold]


def compare(old: Report, new: Report) -> Comparison:
    """Matches the results of two runs.

    Only benchmarks that ran in the new one count: a run by name is compared by name.

    Raises:
      ReportError: if the devices or the sizes of the shapes differ.
    """
    if (old.device, old.small) != (new.device, new.small):
        raise ReportError(
            f"Expected reports of one kind of device and of shapes, got {_kind(old)} "
            f"and {_kind(new)}."
        )
    after = {_key(row): row for row in new.rows}
    ran = {row["benchmark"] for row in new.rows}
    before = {_key(row): row for row in old.rows if row["benchmark"] in ran}
    changes = [
        Change(*key, microseconds(before[key]), microseconds(after[key]))
        for key in before
        if key in after
    ]
    return Comparison(changes, [key for key in before if key not in after])


def _key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["benchmark"], row["op"], row["case"], row["implementation"]


def _kind(report: Report) -> str:
    return f"{report.device} ({'small' if report.small else 'full'} shapes)"
