"""Kills `fp8kv calibrate` with SIGKILL at random points and compares the results.

    python tests/fp8kv_jax/scales/kill_calibrate.py [--kills 5] [--seed 0]

Runs once undisturbed; then, for each kill, starts from nothing, kills the run at a
random time of its life, starts it again and compares the bytes of scales.safetensors
and the artifact's id. Not collected by pytest: it takes minutes. Exits with 1 if
anything differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
CALIBRATE = """
import sys
from fp8kv_jax.cli import main
sys.exit(main.run(["calibrate", *sys.argv[1:]]))
"""
# 400 batches of 64 tokens, each saved: most of the run's life is observing and saving.
OPTIONS = ("--num-samples", "400", "--save-every", "1", "--json")


def write_text(folder: Path) -> Path:
    """Writes enough words, no two passages alike."""
    words = random.Random(0)
    names = ["scale", "window", "freeze", "page", "slot", "token", "head", "layer"]
    text = " ".join(
        f"{words.choice(names)}{words.randrange(10**6)}" for _ in range(4 * 10**4)
    )
    path = folder / "words.txt"
    path.write_text(text)
    return path


def start(data: Path, out: Path) -> subprocess.Popen:
    arguments = ["--model", TINY, "--data", data, "--out", out, *OPTIONS]
    return subprocess.Popen(
        [sys.executable, "-c", CALIBRATE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
    )


def finish(process: subprocess.Popen) -> dict:
    out, err = process.communicate()
    if process.returncode:
        sys.exit(f"calibrate failed: {err}")
    return json.loads(out)


def outcome(out: Path) -> tuple[bytes, str]:
    manifest = json.loads((out / "manifest.json").read_bytes())
    return (out / "scales.safetensors").read_bytes(), manifest["artifact_id"]


def newest_save(out: Path) -> str:
    states = out.with_name(f"{out.name}.running") / "states"
    if not states.exists():
        return "no state"
    saved = [int(p.name) for p in states.iterdir() if p.name.isdigit()]
    return f"{max(saved)} batches saved" if saved else "nothing saved"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    different = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_text(folder)
        began = time.monotonic()
        finish(start(data, folder / "undisturbed"))
        life = time.monotonic() - began
        want = outcome(folder / "undisturbed")
        print(f"undisturbed: {life:.1f} s, artifact {want[1]}", flush=True)
        kills = trials = 0
        while kills < arguments.kills:
            trials += 1
            out = folder / f"killed{trials}"
            process = start(data, out)
            delay = draw.uniform(0.1, 1.0) * life
            time.sleep(delay)
            alive = process.poll() is None
            process.kill()
            process.communicate()
            if not alive:
                continue  # it was faster than the undisturbed run: another time
            kills += 1
            saved = newest_save(out)
            resumed = finish(start(data, out))["resumed_samples"]
            same = outcome(out) == want
            different += not same
            print(
                f"kill {kills} after {delay:.1f} s: {saved}; went on after {resumed} "
                f"samples; {'same bytes and id' if same else 'DIFFERENT'}",
                flush=True,
            )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
