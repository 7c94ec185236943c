"""Real keys and values of Qwen2.5-Coder-1.5B through the cache: what a window is worth.

The slice in `data/` is a one-layer cache: K of layer 0, whose key bias gives an amax
of 358, and V of layer 26, whose amax doubles between the readiness probe and code.
The whole trace (28 layers) is read from the file that FP8KV_KV_TRACE names.
"""

import os
import pathlib

import numpy as np
import pytest
from rows_loop import RowsLoop
from safetensors.numpy import load_file

SLICE = pathlib.Path(__file__).parent / "data/qwen2.5-coder_kv_slice.safetensors"


def replay(texts, *, window):
    """Writes texts one after another; a text's end ends a batch."""
    num_layers, _, heads, dim = texts[0][0].shape
    loop = RowsLoop(
        chunk=64,
        cache={
            "num_layers": num_layers,
            "num_kv_heads": heads,
            "head_dim": dim,
            "num_pages": -(-sum(k.shape[1] for k, _ in texts) // 64),
            "page_size": 64,
        },
        window_tokens=window,
    )
    for k, v in texts:
        loop.write_all(k, v)
    assert loop.differing_bytes == 0
    return loop


def rows_of(tensors, *names):
    return [(tensors[f"{name}.k"], tensors[f"{name}.v"]) for name in names]


def test_scales_frozen_on_the_probe_saturate_two_values_of_code():
    texts = rows_of(load_file(SLICE), "probe", "chat", "code", "more_code")
    loop = replay(texts, window=30)
    assert int(loop.state.tokens_seen) == 30
    assert loop.count("k").sum() == 0
    assert loop.count("v").sum() == 2


def test_a_window_that_reaches_into_code_saturates_nothing():
    texts = rows_of(load_file(SLICE), "probe", "chat", "code", "more_code")
    loop = replay(texts, window=100)
    assert int(loop.state.tokens_seen) == 30 + 44 + 32
    seen = max(np.abs(k.astype(np.float32)).max() for k, _ in texts[:3])
    assert float(loop.state.k_amax.max()) == seen > 350
    assert loop.count("k").sum() + loop.count("v").sum() == 0


@pytest.mark.model
@pytest.mark.parametrize(("window", "expected"), [(30, {26: 2}), (256, {})])
def test_whole_trace_saturates_as_measured(window, expected):
    path = os.environ.get("FP8KV_KV_TRACE")
    if not path:
        pytest.skip("needs the whole K/V trace, named by FP8KV_KV_TRACE")
    texts = rows_of(load_file(path), "probe", "chat", "code")
    loop = replay(texts, window=window)
    assert loop.count("k").sum() == 0
    by_layer = loop.count("v").sum(axis=1)
    assert {int(i): int(by_layer[i]) for i in np.flatnonzero(by_layer)} == expected
