"""The benchmarks run: each checks its op against the reference, then times it."""

import pytest

from benchmarks import suite
from benchmarks.report import microseconds


@pytest.mark.parametrize("name", suite.NAMES)
def test_small_benchmarks_check_and_time_their_op(name):
    rows = list(suite.load(name)(small=True))
    rows = [row for row in rows if "skipped" not in row]
    assert rows
    assert all(microseconds(row) > 0 for row in rows)
    assert all({"op", "case", "implementation"} <= set(row) for row in rows)
