"""The serving benchmark runs, and compares both caches in all that it measures."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_both_caches_are_measured_alike(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.serving", "--small", "--out", str(out)]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    rows = json.loads(out.read_text())["rows"]
    of: dict = {}
    for row in rows:
        of.setdefault(row["what"], []).append(row)
    assert [row["phase"] for row in of["calibration"]] == [
        *("window", "freeze", "settling", "after")
    ]
    # In the same bytes.
    assert [row["tokens"] for row in of["pool"]] == [192, 96]
    assert [row["requests"] for row in of["full pool"]] == [4, 2]
    served = [(row["concurrency"], row["cache"]) for row in of["serve"]]
    assert served == [(4, "fp8"), (4, "bf16"), (1, "fp8"), (1, "bf16")]
    assert all(row["output_tokens_per_s"] > 0 for row in of["serve"])
