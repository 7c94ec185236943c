"""The replay engine: what it scores, and that its memory does not grow."""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
import replay_examples as example

from fp8kv_jax.drift import replay as engine
from fp8kv_jax.drift.replay import Replay, ReplaySequence

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def params():
    return example.init_params()


@pytest.fixture(scope="module")
def scales(params):
    return example.calibrate(params)


def spell(ids):
    return " ".join(map(str, ids))


def run(params, scales, sequences, decode=spell, **changes):
    replay = Replay(
        example.forward,
        params,
        scales,
        example.replay_config(**changes),
        example.slices_of(max_new_tokens=16),
        decode=decode,
    )
    for done in replay.run(sequences):
        assert done == replay.num_tokens
    return replay


@pytest.fixture(scope="module")
def replayed(params, scales):
    sequences = example.texts(9)
    return sequences, run(params, scales, sequences)


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def dequantized(rows, scale):
    """Rows [layers, tokens, heads, dim] as an FP8 cache gives them back."""
    rows = np.asarray(jnp.asarray(rows).astype(jnp.bfloat16).astype(jnp.float32))
    codes = np.clip(rows / scale[:, None, :, None], -448, 448)
    return np.asarray(jnp.asarray(codes).astype(jnp.float8_e4m3fn).astype(jnp.float32))


def test_every_token_is_scored_once_and_in_its_slices(replayed):
    sequences, replay = replayed
    total = sum(len(s.token_ids) for s in sequences)
    report = replay.quality_report()
    assert replay.num_tokens == report.overall.slice.num_tokens == total
    for name in ("chat", "code"):
        want = sum(len(s.token_ids) for s in sequences if s.data_class == name)
        got = [x for x in report.slices if x.slice.name == name]
        assert [x.slice.num_tokens for x in got] == [want]
    ranges = replay.range_report()
    assert ranges.overall.slice.num_tokens == total
    values = total * example.HEAD_DIM
    assert {sum(x) for row in ranges.overall.k.histogram for x in row} == {values}
    assert sum(report.curves[0].num_tokens) == total


def test_perplexity_in_full_precision_is_the_models_own(params, replayed):
    sequences, replay = replayed
    losses = []
    for sequence in sequences:
        _, logits = example.record_rows(params, sequence.token_ids)
        picked = log_softmax(logits.astype(np.float64))[:-1]
        rows = np.arange(len(picked))
        losses.extend(-picked[rows, sequence.token_ids[1:]])
    want = np.exp(np.mean(losses))
    # The cache's float32 attention sums in another order.
    got = replay.quality_report().overall.perplexity_full
    assert got == pytest.approx(want, rel=1e-4)


def test_the_live_amax_is_that_of_the_models_own_rows(params, replayed):
    sequences, replay = replayed
    want = np.zeros((2, example.NUM_LAYERS, example.NUM_KV_HEADS))
    for sequence in sequences:
        rows, _ = example.record_rows(params, sequence.token_ids)
        rows = np.asarray(jnp.asarray(rows).astype(jnp.bfloat16).astype(jnp.float32))
        want = np.maximum(want, np.abs(rows).max(axis=(2, 4)))
    overall = replay.range_report().overall
    # One BF16 step where the last bit of the row differs.
    np.testing.assert_allclose(overall.k.live_amax, want[0], rtol=2**-8)
    np.testing.assert_allclose(overall.v.live_amax, want[1], rtol=2**-8)
    assert not replay.range_report().flags
    assert replay.range_report().fp8_run_saturated == 0


def test_the_worst_tokens_show_their_text(replayed):
    sequences, replay = replayed
    report = replay.quality_report()
    worst = report.worst_tokens
    assert [x.kl for x in worst] == sorted((x.kl for x in worst), reverse=True)
    assert worst[0].kl == report.overall.kl_max
    sequence = next(s for s in sequences if s.name == worst[0].sample)
    context = list(map(int, worst[0].context.split()))
    end = worst[0].position + 1
    assert context == sequence.token_ids[max(0, end - 24) : end]
    assert worst[0].next_token == spell(sequence.token_ids[end : end + 1])


@pytest.mark.parametrize(("text", "shown"), [("\ufffd", "\ufffd "), ("", "")])
def test_likeliest_tokens_without_a_text_of_their_own_have_their_ids(
    params, scales, replayed, text, shown
):
    sequences, replay = replayed
    broken = run(params, scales, sequences, decode=lambda ids: text * len(ids))
    pairs = zip(
        replay.quality_report().worst_tokens,
        broken.quality_report().worst_tokens,
        strict=True,
    )
    for whole, part in pairs:
        assert part.full_top == f"{shown}(token {whole.full_top})"
        assert part.fp8_top == f"{shown}(token {whole.fp8_top})"


def test_how_sequences_are_packed_changes_nothing_but_rounding(
    params, scales, replayed
):
    sequences, replay = replayed
    want = replay.quality_report().overall
    other = run(params, scales, sequences[::-1], tokens_per_step=64)
    got = other.quality_report().overall
    assert got.slice == want.slice
    assert got.kl_mean == pytest.approx(want.kl_mean, rel=0.02)
    assert other.range_report().overall.k.live_amax == pytest.approx(
        np.array(replay.range_report().overall.k.live_amax), rel=2**-8
    )


def test_a_long_context_takes_few_steps_to_the_same_result(
    params, scales, replayed, monkeypatch
):
    # Eight tokens, or half of the context of 96.
    monkeypatch.setattr(engine, "_STEP_WIDTH", 8)
    monkeypatch.setattr(engine, "_STEPS_PER_CONTEXT", 2)
    sequences, want = replayed
    other = Replay(
        example.forward,
        params,
        scales,
        example.replay_config(tokens_per_step=example.MAX_TOKENS),
        example.slices_of(max_new_tokens=16),
        decode=lambda ids: "",
    )
    longest = max(sequences, key=lambda s: len(s.token_ids))
    assert len(longest.token_ids) > example.MAX_TOKENS // 2
    assert len(list(other.run([longest]))) == 2
    list(other.run([s for s in sequences if s is not longest]))
    want, got = (r.quality_report().overall for r in (want, other))
    assert got.slice == want.slice
    assert got.kl_mean == pytest.approx(want.kl_mean, rel=0.02)


def test_wider_fp8_steps_lose_more(params, scales, replayed):
    # Scales far too large leave few of E4M3's octaves: a bound that bites.
    sequences, replay = replayed
    amax = 2.0**16 * np.stack([scales.k_amax, scales.v_amax])
    coarse = run(params, example.scales_from(amax), sequences)
    before, after = (r.quality_report().overall.kl_mean for r in (replay, coarse))
    assert before < 1e-3
    assert after > 20 * before
    attention = coarse.quality_report().attention_error
    assert min(map(min, attention)) > 0.2


def test_layers_kept_wide_have_no_error_and_no_range(params, scales):
    cache = example.cache_config(high_precision_layers=(0, 1, 3))
    kept = type(scales)(
        layers=(2,),
        granularity="head",
        **{
            name: getattr(scales, name)[[2]]
            for name in (
                "k_scale",
                "v_scale",
                "k_inv_scale",
                "v_inv_scale",
                "k_amax",
                "v_amax",
            )
        },
    )
    replay = run(params, kept, example.texts(2), cache=cache)
    report = replay.quality_report()
    assert replay.range_report().layers == (2,)
    assert report.attention_error[0] == report.attention_error[1] == (0, 0)
    assert min(report.attention_error[2]) > 0


def test_generated_tokens_are_a_slice_and_a_curve_of_their_own(params, scales):
    ids = example.texts(1)[0].token_ids[:30]
    sequence = ReplaySequence(
        name="a", token_ids=ids, prompt_length=20, data_class="chat", language="en"
    )
    report = run(params, scales, [sequence]).quality_report()
    sizes = {
        x.slice.name: x.slice.num_tokens
        for x in report.slices
        if x.slice.dimension == "generation_position"
    }
    assert sizes == {"prompt": 20, "1-16": 10}
    assert [x.axis for x in report.curves] == ["context", "generated"]
    assert sum(report.curves[1].num_tokens) == 10


def test_memory_does_not_grow_with_the_workload(params, scales):
    drawn = 0

    def endless(number):
        nonlocal drawn
        for drawn in range(1, number + 1):
            ids = [(drawn * 7 + i) % example.LOUD_TOKEN for i in range(40)]
            yield ReplaySequence(
                name=f"text {drawn}",
                token_ids=ids,
                prompt_length=40,
                data_class="chat",
                language="en",
            )

    replay = Replay(
        example.forward,
        params,
        scales,
        example.replay_config(),
        example.slices_of(max_new_tokens=16),
        decode=lambda ids: "",
    )
    ahead = [drawn * 40 - done for done in replay.run(endless(16))]
    tracemalloc.start()
    used = []
    for number in (40, 160):
        for done in replay.run(endless(number)):
            del done
        used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # No more sequences are drawn than there are rows to run them on.
    assert max(ahead) <= 4 * 40
    assert used[1] - used[0] < 50_000  # 160 texts hold some 200 kB of ids


def test_a_model_that_gives_nan_is_an_error_that_names_the_sample(params, scales):
    broken = params | {"embedding": params["embedding"].at[3].set(jnp.nan)}
    sequence = ReplaySequence(
        name="line 7",
        token_ids=[1, 2, 3, 4],
        prompt_length=4,
        data_class="chat",
        language="en",
    )
    with pytest.raises(ValueError, match="Expected finite logits for line 7, got NaN"):
        run(broken, scales, [sequence])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 1}, "Expected top_k of at least 2, got 1."),
        ({"tokens_per_step": 8}, "Expected tokens_per_step of at least 16, got 8."),
        ({"small_margin": float("nan")}, "Expected small_margin to be a number"),
        ({"num_worst": -1}, "Expected num_worst of at least 0, got -1."),
        ({"cache": example.cache_config(dtype="bf16")}, "Expected a layer in FP8"),
    ],
)
def test_a_wrong_setting_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        example.replay_config(**changes)


def test_the_replays_kl_is_that_of_fake_quantized_attention(params, scales):
    # The same pass with rows that went through E4M3 by hand, in plain jnp.
    sequence = example.texts(1)[0]
    replay = run(params, scales, [sequence])
    _, full = example.record_rows(params, sequence.token_ids)
    k_scale, v_scale = scales.k_scale, scales.v_scale

    def attend(carry, layer, q, k, v):
        k, v = (
            dequantized(np.asarray(x), scale[layer : layer + 1]) * scale[layer][:, None]
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        k, v = (np.repeat(x[0], 2, axis=1) for x in (k, v))
        scores = np.einsum("qhd,khd->hqk", np.asarray(q[0]), k) * k.shape[-1] ** -0.5
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool))[None], scores, -1e30)
        out = np.einsum("hqk,khd->qhd", np.exp(log_softmax(scores)), v)
        return jnp.asarray(out[None], jnp.float32), carry

    ids = jnp.asarray([sequence.token_ids], jnp.int32)
    positions = jnp.arange(ids.shape[1])[None]
    narrow, _ = example.forward(params, ids, positions, attend, None)
    p, q = log_softmax(full.astype(np.float64)), log_softmax(np.float64(narrow[0]))
    want = (np.exp(p) * (p - q)).sum(axis=-1)
    got = replay.quality_report().overall
    assert got.kl_mean == pytest.approx(want.mean(), rel=0.02)
    assert got.kl_max == pytest.approx(want.max(), rel=0.05)


def test_clipping_is_found_where_it_is_and_the_fp8_runs_counters_agree(params, scales):
    amax = np.stack([scales.k_amax, scales.v_amax]).copy()
    amax[1, 2, 0] /= 8
    replay = run(params, example.scales_from(amax), example.texts(4))
    report = replay.range_report()
    found = {(x.kind, x.tensor, x.layer, x.head) for x in report.flags}
    assert found == {("clipped", "v", 2, 0), ("drifted", "v", 2, 0)}
    # Each counts the rows of its own run.
    saturated = report.overall.v.saturated[2][0]
    assert report.fp8_run_saturated == pytest.approx(saturated, rel=0.05)
    assert saturated > 100
