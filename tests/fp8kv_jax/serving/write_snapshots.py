"""Saves snapshots; what a test does to it is the test's.

python write_snapshots.py FOLDER for-ever | full
"""

import itertools
import pathlib
import resource
import signal
import sys

# For the tiny model, as conftest.py does for the tests.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))


def main(folder: pathlib.Path, kind: str) -> None:
    from serving_loop import engine_with_scales

    from fp8kv_jax.serving.snapshot import SnapshotError, save_snapshot

    engine = engine_with_scales(num_cached=8)
    for number in itertools.count():
        if kind == "full" and number == 1:
            # As from a disk with no room: writes past 512 bytes of a file fail.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        try:
            place = save_snapshot(folder, engine, model={"weights": "a"}, max_pages=8)
        except SnapshotError as error:
            print(error, flush=True)
            return
        print(place.name, flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
