"""Paged attention: the reference against a loop, and what the op refuses."""

import dataclasses
import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_attention_calls import (
    SMALL,
    TOLERANCE,
    attend,
    largest_error,
    permute_pages,
    poison_dead_slots,
    spans,
)

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.paged_attention import paged_attention, reference
from pallas_kernels.paged_attention.cases import Case, make_inputs


def loop_attention(case: Case, args, arrays) -> np.ndarray:
    """The definition in float64, one query of one head and one token at a time."""
    q, k_pages, v_pages, table = (np.asarray(x).astype(np.float64) for x in args[:4])
    k_scale, v_scale = (
        np.broadcast_to(arrays.get(name, 1.0), case.num_kv_heads)
        for name in ("k_scale", "v_scale")
    )
    group_size = case.num_q_heads // case.num_kv_heads
    out = np.zeros(q.shape)
    for seq, query, head in np.ndindex(q.shape[:3]):
        start, kv = spans(case)[seq][0], head // group_size
        position = start + query
        if not 0 <= position < case.seq_lens[seq]:
            continue
        first = max(0, position - (case.sliding_window or 1 << 30) + 1)
        logits, values = [], []
        for t in range(first, position + 1):
            page, at = int(table[seq, t // case.page_size]), t % case.page_size
            logit = q[seq, query, head] @ k_pages[page, kv, at] * k_scale[kv]
            logit *= case.head_dim**-0.5
            if cap := case.logit_soft_cap:
                logit = cap * np.tanh(logit / cap)
            logits.append(logit)
            values.append(v_pages[page, kv, :, at] * v_scale[kv])
        weights = np.exp(np.array(logits) - max(logits))
        out[seq, query, head] = weights @ np.array(values) / weights.sum()
    return out


class TestReference:
    @pytest.mark.parametrize(
        ("name", "page_size"), [*((name, 16) for name in SMALL), ("fp8", 128)]
    )
    def test_equals_the_definition_whatever_dead_slots_hold(self, name, page_size):
        """Rows 27 and 29 of the cases: page edges, length 0, a dead tenant's NaN."""
        case = SMALL[name]
        case = dataclasses.replace(case, page_size=page_size, q_dtype=jnp.float32)
        args, arrays = make_inputs(case, 0)
        args = poison_dead_slots(case, args)
        got = attend(case, args, arrays, implementation="xla")
        # Sums of at most 300 terms in float32: 2^-24 * sqrt(300) each, twice.
        want = loop_attention(case, args, arrays)
        assert np.isfinite(want).all()
        assert largest_error(got, want) < 2.0**-18

    def test_serves_float32_pools(self):
        case = dataclasses.replace(SMALL["bf16"], pool_dtype=jnp.float32)
        args, arrays = make_inputs(case, 0)
        got = attend(case, args, arrays)
        assert largest_error(got, loop_attention(case, args, arrays)) < TOLERANCE

    def test_softmax_scale_replaces_the_default(self):
        case = SMALL["fp8"]
        (q, *rest), arrays = make_inputs(case, 0)
        got = attend(case, (q, *rest), arrays, softmax_scale=0.5 * 64**-0.5)
        # Half of a BF16 is exact.
        want = attend(case, (q * jnp.bfloat16(0.5), *rest), arrays)
        np.testing.assert_array_equal(got, want)

    def test_blocks_of_sequences_and_queries_change_nothing(self, monkeypatch):
        case = dataclasses.replace(SMALL["fp8"], num_queries=7, seq_lens=(130, 0, 70))
        args, arrays = make_inputs(case, 0)
        options = {"query_starts": None, "softmax_scale": 0.125, **case.options}
        f = functools.partial(
            reference.paged_attention_reference, *args, **arrays, **options
        )
        want = f()
        # 256 tokens of 8 heads: 2 queries at once, and 1 sequence.
        monkeypatch.setattr(reference, "_MAX_FLOATS", 2 * 8 * 256)
        got = f()
        assert "while" in str(jax.make_jaxpr(f)()) or "scan" in str(jax.make_jaxpr(f)())
        assert largest_error(got, want) < TOLERANCE

    def test_never_widens_a_pool(self):
        case = dataclasses.replace(SMALL["fp8"], seq_lens=(130, 0, 300))
        args, arrays = make_inputs(case, 0)
        pools = [jnp.concatenate([pages] * 8) for pages in args[1:3]]
        f = functools.partial(paged_attention, implementation="xla")
        lowered = jax.jit(f).lower(args[0], *pools, *args[3:], **arrays)
        shape = ",".join(str(n) for n in pools[0].shape)
        text = lowered.compile().as_text()
        assert f"f8e4m3fn[{shape}]" in text
        assert f"f32[{shape}]" not in text
        assert f"f16[{shape}]" not in text


class TestEveryEntry:
    """Row 26: decode, chunked prefill and one-shot prefill agree, scales included."""

    def prefill(self, chunk: int, k_scale: float, v_scale: float) -> np.ndarray:
        """Outputs for all 40 tokens of a sequence, `chunk` queries at a time."""
        case = Case(num_q_heads=4, num_kv_heads=2, head_dim=64, seq_lens=(40,))
        (_, k_pages, v_pages, table, _), _ = make_inputs(case, 0)
        q = jax.random.normal(jax.random.key(1), (1, 40, 4, 64), jnp.float32)
        outs = []
        for start in range(0, 40, chunk):
            outs.append(
                paged_attention(
                    q[:, start : start + chunk],
                    k_pages,
                    v_pages,
                    table,
                    jnp.array([min(40, start + chunk)], jnp.int32),
                    k_scale=k_scale,
                    v_scale=v_scale,
                )
            )
        return np.concatenate(outs, axis=1)

    def test_row_26_all_entries_agree(self):
        one_shot = self.prefill(40, 0.25, 0.5)
        for chunk in (1, 8, 16):
            got = self.prefill(chunk, 0.25, 0.5)
            assert largest_error(got, one_shot) < 2.0**-18

    @pytest.mark.parametrize("chunk", [1, 8, 40])
    def test_row_26_each_scale_counts_in_each_entry(self, chunk):
        base = self.prefill(chunk, 0.25, 0.5)
        assert largest_error(self.prefill(chunk, 1.0, 0.5), base) > 0.1
        v_times_4 = self.prefill(chunk, 0.25, 2.0)
        assert largest_error(v_times_4, 4 * base) < 2.0**-18

    def test_row_25_k_and_v_have_scales_of_their_own(self):
        assert largest_error(self.prefill(8, 0.5, 0.25), self.prefill(8, 0.25, 0.5)) > 0

    def test_a_padded_chunk_equals_the_chunk(self):
        case = Case(num_q_heads=4, num_kv_heads=2, head_dim=64, seq_lens=(40,))
        (_, *rest), arrays = make_inputs(case, 0)
        q = jax.random.normal(jax.random.key(1), (1, 16, 4, 64), jnp.float32)
        # 10 queries at 30 to 39, and 6 that are padding.
        q = q.at[:, 10:].set(jnp.nan)
        starts = jnp.array([30], jnp.int32)
        padded = paged_attention(q, *rest, query_starts=starts, **arrays)
        want = paged_attention(q[:, :10], *rest, query_starts=starts, **arrays)
        assert largest_error(padded[:, :10], want) < 2.0**-18
        assert not padded[:, 10:].any()


class TestBadNumbersStayLocal:
    @pytest.mark.parametrize("pool", ["k", "v"])
    def test_nan_in_a_live_row_reaches_its_own_sequence_alone(self, pool):
        case = dataclasses.replace(SMALL["fp8"], seq_lens=(130, 100))
        args, arrays = make_inputs(case, 0)
        clean = attend(case, args, arrays)
        q, k_pages, v_pages, table, seq_lens = args
        page = int(table[0, 0])
        if pool == "k":
            k_pages = k_pages.at[page, :, 5].set(FP8_DTYPE(jnp.nan))
        else:
            v_pages = v_pages.at[page, :, :, 5].set(FP8_DTYPE(jnp.nan))
        got = attend(case, (q, k_pages, v_pages, table, seq_lens), arrays)
        assert np.isnan(got[0]).all()
        np.testing.assert_array_equal(got[1], clean[1])


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_permuting_pages_with_their_table_changes_nothing(name):
    case = SMALL[name]
    args, arrays = make_inputs(case, 0)
    want = attend(case, args, arrays)
    np.testing.assert_array_equal(attend(case, permute_pages(case, args), arrays), want)


def test_the_tolerance_bites():
    """Zeros, swapped pools and a scale off by 2 all exceed it."""
    case = dataclasses.replace(SMALL["fp8-head-dim-128"], page_size=128)
    (q, k_pages, v_pages, *rest), arrays = make_inputs(case, 0)
    want = attend(case, (q, k_pages, v_pages, *rest), arrays)
    swapped = attend(case, (q, v_pages, k_pages, *rest), arrays)
    wrong = [np.zeros_like(want), swapped]
    for name in ("k_scale", "v_scale"):
        scales = {**arrays, name: 2 * arrays[name]}
        wrong.append(attend(case, (q, k_pages, v_pages, *rest), scales))
    for got in wrong:
        assert largest_error(got, want) > 10 * TOLERANCE


def test_the_documented_example_runs():
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    example = parser.get_doctest(paged_attention.__doc__, {}, "op", None, 0)
    assert example.examples
    assert runner.run(example).failed == 0


def test_a_second_call_compiles_nothing():
    case = SMALL["fp8"]
    args, arrays = make_inputs(case, 0)
    attend(case, args, arrays)
    compiled = paged_attention._cache_size()
    args, arrays = make_inputs(case, 1)
    attend(case, args, arrays)
    assert paged_attention._cache_size() == compiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (3, 1, 8, 32)}, "Expected q to be .* head_dim 64 of k_pages"),
        ({"q": (3, 8, 64)}, "Expected q to be .*num_queries"),
        ({"q": (3, 1, 7, 64)}, "num_q_heads=7 to be a multiple of num_kv_heads=2"),
        ({"block_table": (2, 2)}, r"block_table to be \[3, pages_per_seq\]"),
        ({"seq_lens": (2,)}, r"seq_lens to be \[3\], one per sequence"),
        ({"query_starts": (2,)}, r"query_starts to be \[3\]"),
        ({"k_scale": None}, "Expected k_scale for FP8 pools, got None"),
        ({"v_scale": (3,)}, "v_scale to be one value or one per KV head .2."),
        ({"sliding_window": 0}, "sliding_window to be positive or None, got 0"),
        ({"softmax_scale": -1.0}, "softmax_scale to be positive or None"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap to be positive or None"),
        ({"implementation": "triton"}, "implementation to be None or one of"),
    ],
)
def test_wrong_arguments_say_what_was_expected(change, message):
    args, arrays = make_inputs(SMALL["fp8"], 0)
    names = ("q", "k_pages", "v_pages", "block_table", "seq_lens")
    call = dict(zip(names, args, strict=True)) | arrays
    for name, value in change.items():
        if isinstance(value, tuple):
            ints = name in ("block_table", "seq_lens", "query_starts")
            value = jnp.zeros(value, jnp.int32 if ints else jnp.float32)
        call[name] = value
    positional = [call.pop(name) for name in names]
    with pytest.raises(ValueError, match=message):
        paged_attention(*positional, **call)


def test_wrong_dtypes_say_what_was_expected():
    (q, *pools, table, seq_lens), arrays = make_inputs(SMALL["fp8"], 0)
    with pytest.raises(ValueError, match="q to be bfloat16 or float32, got float16"):
        paged_attention(q.astype(jnp.float16), *pools, table, seq_lens, **arrays)
    with pytest.raises(ValueError, match="block_table to be int32, got int16"):
        paged_attention(q, *pools, table.astype(jnp.int16), seq_lens, **arrays)
    pools = [pages.astype(jnp.bfloat16) for pages in pools]
    with pytest.raises(ValueError, match="k_scale to be None: only FP8 pools"):
        paged_attention(q, *pools, table, seq_lens, **arrays)
