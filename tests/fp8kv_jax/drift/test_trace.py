"""Recorded traces: what is written is read back, and a wrong file says what it is."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from sweep_examples import SHAPE, SLICE, random_rows, write_random

from fp8kv_jax.drift.trace import TraceError, open_trace, write_trace

ROWS = (2, 3, 2, 16)


def save(path, **changes):
    """Writes one text that is right but for the changes."""
    tensors = {
        "a.k": np.ones(ROWS, np.float32),
        "a.v": np.ones(ROWS, np.float32),
        "a.tokens": np.arange(3, dtype=np.int32),
    }
    tensors |= {name.replace("__", "."): x for name, x in changes.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, path)
    return path


def test_what_is_written_is_read_back_in_the_order_of_writing(tmp_path):
    path = tmp_path / "t.safetensors"
    lengths = {"code/1": 5, "code/0": 3, "chat": 1}
    rows = write_random(path, lengths)
    trace = open_trace(path)
    assert [(t.name, t.num_tokens) for t in trace.texts] == list(lengths.items())
    assert trace.classes == ("code", "chat")
    assert trace.shape == SHAPE
    assert trace.num_tokens == 9
    for name, pair in rows.items():
        got = trace.rows(name, 0, lengths[name])
        for x, wanted in zip(got, pair, strict=True):
            assert x.tobytes() == wanted.tobytes()
        assert trace.token_ids(name).tolist() == list(range(lengths[name]))


def test_other_readers_of_safetensors_read_it(tmp_path):
    from safetensors.numpy import load_file

    path = tmp_path / "t.safetensors"
    rows = write_random(path, {"chat": 4})
    assert np.array_equal(load_file(path)["chat.v"], rows["chat"][1])


def test_blocks_cover_a_text_once(tmp_path):
    path = tmp_path / "t.safetensors"
    rows = write_random(path, {"chat": 7})
    starts, ks, vs = zip(*open_trace(path).blocks("chat", 3), strict=True)
    assert starts == (0, 3, 6)
    assert np.array_equal(np.concatenate(ks, axis=1), rows["chat"][0])
    assert np.array_equal(np.concatenate(vs, axis=1), rows["chat"][1])


def test_wider_rows_are_rounded_to_bf16_as_the_cache_does(tmp_path):
    x = np.full(ROWS, 1 + 2**-8 + 2**-20, np.float32)
    trace = open_trace(save(tmp_path / "t", a__k=x))
    k, _ = trace.rows("a", 0, 3)
    assert k.dtype == jnp.bfloat16
    assert (k.astype(np.float32) == 1 + 2**-7).all()


def test_the_slice_of_a_real_trace_opens():
    trace = open_trace(SLICE)
    assert trace.classes == ("chat", "code", "more_code", "probe")
    assert "Qwen2.5" in trace.metadata["source"]


def test_a_recording_that_fails_leaves_nothing(tmp_path):
    def rows():
        yield random_rows(2, 0), random_rows(2, 1)
        raise KeyboardInterrupt

    ids = {name: np.arange(2, dtype=np.int32) for name in "ab"}
    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "t", ids, rows(), shape=SHAPE)
    assert not list(tmp_path.iterdir())


def test_rows_of_another_length_are_refused(tmp_path):
    ids = {"a": np.arange(3, dtype=np.int32)}
    rows = [(random_rows(2, 0), random_rows(2, 1))]
    with pytest.raises(ValueError, match=r"k of text 'a' to be \(2, 3, 2, 16\)"):
        write_trace(tmp_path / "t", ids, rows, shape=SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": np.ones(2, np.float32)}, r"NAME\.k.*got 'weight'"),
        ({"a__q": np.ones(2, np.float32)}, r"NAME\.k.*got 'a\.q'"),
        ({"a__k": np.ones(ROWS, np.int8)}, "a.k in t to be of type BF16.*got I8"),
        ({"a__tokens": np.ones(3, np.float32)}, "a.tokens.*I32, I64, got F32"),
        ({"a__v": None}, "a.v in t beside a.k, got none"),
        ({"a__k": None}, "a.k in t beside a"),
        ({"a__k": np.ones((3, 2, 16), np.float32)}, r"num_layers, num_tokens.*\[3, 2"),
        ({"a__k": np.ones((2, 0, 2, 16), np.float32)}, r"none of them 0.*\[2, 0, 2"),
        ({"a__v": np.ones((2, 4, 2, 16), np.float32)}, r"the shape of a\.k, got \[2"),
        ({"a__tokens": np.arange(4, dtype=np.int32)}, r"\[3\], the tokens of a\.k"),
        (
            {f"b__{x}": np.ones((2, 3, 4, 16), np.float32) for x in "kv"},
            r"b\.k in t to have the layers.* of a\.k, \[2, 2, 16\], got \[2, 4, 16\]",
        ),
    ],
)
def test_a_file_that_is_no_trace_says_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(TraceError, match=message):
        open_trace(save(tmp_path / "t", **changes))


def test_a_missing_file_a_damaged_one_and_an_empty_one_are_told(tmp_path):
    with pytest.raises(TraceError, match="found no such file"):
        open_trace(tmp_path / "none")
    path = save(tmp_path / "t")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TraceError, match="Expected t to be a whole safetensors file"):
        open_trace(path)
    save_file({}, path)
    with pytest.raises(TraceError, match="Expected a text in t, got none"):
        open_trace(path)


def test_token_ids_are_asked_for_only_where_they_are(tmp_path):
    trace = open_trace(save(tmp_path / "t", a__tokens=None))
    with pytest.raises(TraceError, match=r"a\.tokens in t.*recorded without"):
        trace.token_ids("a")
