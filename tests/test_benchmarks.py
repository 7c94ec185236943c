"""The benchmarks run: each checks its op against the reference, then times it."""

import importlib

import pytest

from benchmarks.__main__ import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_small_benchmarks_check_and_time_their_op(name):
    rows = importlib.import_module(f"benchmarks.bench_{name}").run(small=True)
    assert rows
    assert all(row["device_us"] > 0 for row in rows)
    assert {"op", "case", "implementation"} <= set(rows[0])
