"""The benchmarks run: each checks its op against the reference, then times it."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks import suite, turn
from benchmarks.report import microseconds


@pytest.mark.parametrize("name", suite.NAMES)
def test_small_benchmarks_check_and_time_their_op(name):
    before = {id(x) for x in jax.live_arrays()}
    made = []
    turn.wait_with(
        lambda: made.append([x for x in jax.live_arrays() if id(x) not in before])
    )
    rows = list(suite.load(name)(small=True))
    assert made == [[]], "the device is used before the turn is taken"
    rows = [row for row in rows if "skipped" not in row]
    assert rows
    assert all(microseconds(row) > 0 for row in rows)
    assert all({"op", "case", "implementation"} <= set(row) for row in rows)


@pytest.mark.slow
def test_a_step_on_two_devices_is_compared_with_one():
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tensor_parallel", "--small"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | two_devices,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    assert [row.get("step") for row in rows][:1] == ["one device"]
    assert any(row.get("collectives") for row in rows)
