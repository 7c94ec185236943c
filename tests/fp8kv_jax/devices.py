"""Starts Python on simulated CPU devices, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(*command, devices):
    # Unoptimized code compiles in a third of the time.
    flags = (
        f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0"
    )
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "PYTHONPATH": str(ROOT),
        },
    )
