"""`fp8kv serve` with the tiny model in place of one from a file.

python serve_tiny.py SNAPSHOTS COMPILED
"""

import functools
import pathlib
import sys
import types

# For the tiny model, as conftest.py does for the tests.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))


def main(snapshots: str, compiled: str) -> None:
    from http_server import MODEL, Decoder
    from serving_loop import make_engine

    from fp8kv_jax.cli.serve import _restore, _serve
    from fp8kv_jax.cli.serve_state import Snapshots
    from fp8kv_jax.serving.http.config import ServerConfig
    from fp8kv_jax.serving.http.server import bind

    engine = make_engine(
        window=30, detokenizer=Decoder, compilation_cache=pathlib.Path(compiled)
    )
    # The test draws nothing: that many compilations less.
    engine.warm_up = functools.partial(engine.warm_up, greedy_only=True)
    request = types.SimpleNamespace(server=ServerConfig(), shutdown_timeout=5)
    kept = Snapshots(pathlib.Path(snapshots), model={"name": "tiny"}, max_pages=8)
    _restore(kept, engine)
    _serve(request, bind("127.0.0.1", 0), engine, MODEL, [], kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
