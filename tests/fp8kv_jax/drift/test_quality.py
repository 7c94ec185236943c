"""Quality figures against plain numpy in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_examples as example

from fp8kv_jax.drift.quality import (
    CurveSums,
    QualitySums,
    WorstTokens,
    compare_logits,
    position_edges,
)
from fp8kv_jax.drift.result_quality import WorstToken


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def logits(num_tokens=70, vocab=500, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    full = rng.normal(scale=4, size=(num_tokens, vocab)).astype(np.float32)
    other = full + rng.normal(scale=noise, size=full.shape).astype(np.float32)
    return full, other, rng.integers(0, vocab, num_tokens).astype(np.int32)


def compare(full, fp8, labels, **changes):
    options = {"top_k": 5, "small_margin": 0.1} | changes
    arrays = map(jnp.asarray, (full, fp8, labels))
    return jax.device_get(compare_logits(*arrays, **options))


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.0])
def test_kl_is_the_divergence_from_full_to_fp8(noise):
    full, fp8, labels = logits(noise=noise)
    got = compare(full, fp8, labels)
    p, q = log_softmax(full), log_softmax(fp8)
    want = (np.exp(p) * (p - q)).sum(axis=-1)
    # Logits up to 16 round to 1e-6, a thousandth of the smallest noise.
    np.testing.assert_allclose(got.kl, want, rtol=5e-3, atol=1e-10)
    swapped = compare(fp8, full, labels).kl
    assert (got.kl >= 0).all()
    if noise == 3.0:  # to second order it is symmetric
        assert np.median(np.abs(swapped / want - 1)) > 0.05


def test_a_run_against_itself_loses_nothing():
    full, _, labels = logits()
    got = compare(full, full, labels)
    assert not got.kl.any()
    assert not got.flips.any()
    assert (got.full_top == got.fp8_top).all()
    np.testing.assert_array_equal(got.full_nll, got.fp8_nll)


def test_losses_and_likeliest_tokens_are_each_runs_own():
    full, fp8, labels = logits(noise=1.0)
    got = compare(full, fp8, labels)
    rows = np.arange(len(labels))
    for x, nll, top, share in (
        (full, got.full_nll, got.full_top, got.full_probability),
        (fp8, got.fp8_nll, got.fp8_top, got.fp8_probability),
    ):
        want = log_softmax(x)
        np.testing.assert_allclose(nll, -want[rows, labels], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(top, x.argmax(axis=-1))
        np.testing.assert_allclose(share, np.exp(want.max(axis=-1)), rtol=1e-4)


@pytest.mark.parametrize("margin", [0.0, 0.2, 100.0])
def test_flips_are_counted_among_the_full_precision_neighbours(margin):
    full, fp8, labels = logits(noise=0.5)
    got = compare(full, fp8, labels, small_margin=margin)
    for row in range(len(labels)):
        order = np.argsort(-full[row], kind="stable")[:5]
        pairs = list(itertools.pairwise(order))
        gaps = np.array([full[row, a] - full[row, b] for a, b in pairs])
        flipped = np.array([fp8[row, a] < fp8[row, b] for a, b in pairs])
        assert got.flips[row] == flipped.sum()
        assert got.close_flips[row] == (flipped & (gaps <= margin)).sum()
        np.testing.assert_allclose(got.gap[row], gaps.sum(), rtol=1e-5)
        want = gaps[flipped].sum()
        np.testing.assert_allclose(got.flipped_gap[row], want, rtol=1e-5, atol=1e-6)


def summed(top_k=5):
    """Two steps of tokens in two classes, and everything about them."""
    sequences = example.texts(4)
    slices = example.slices_of()
    sums = QualitySums(slices, num_layers=2, num_kv_heads=2, top_k=top_k)
    columns, qualities, labelled = [], [], []
    for step in (0, 1):
        full, fp8, labels = logits(seed=step, noise=0.3)
        quality = compare(full, fp8, labels)
        name = sequences[step]
        ids = slices.of_tokens(
            data_class=name.data_class,
            language=name.language,
            prompt_length=len(labels),
            positions=np.arange(len(labels), dtype=np.int32),
        )
        has_label = np.arange(len(labels)) % 7 > 0
        sums.add(quality, ids, has_label)
        columns.append(ids)
        qualities.append(quality)
        labelled.append(has_label)
    joined = type(qualities[0])(*map(np.concatenate, zip(*qualities, strict=True)))
    return sums, slices, np.concatenate(columns), joined, np.concatenate(labelled)


def test_every_slice_sums_up_its_own_tokens():
    sums, slices, ids, quality, labelled = summed()
    report = sums.report((), ())
    assert report.overall.slice.num_tokens == len(labelled)
    for part in report.slices:
        index = slices.names.index((part.slice.dimension, part.slice.name))
        mine = (ids == index).any(axis=1)
        assert part.slice.num_tokens == mine.sum()
        kl = quality.kl[mine].astype(np.float64)
        np.testing.assert_allclose(part.kl_mean, kl.mean(), rtol=1e-9)
        assert part.kl_max == kl.max()
        same = (quality.full_top == quality.fp8_top)[mine]
        assert part.top1_agreement == pytest.approx(same.mean())
        nll = quality.fp8_nll[mine & labelled].astype(np.float64)
        assert part.perplexity_fp8 == pytest.approx(np.exp(nll.mean()))
        assert part.misranking.num_pairs == 4 * mine.sum()
        flips = quality.flips[mine].sum()
        assert part.misranking.flips == pytest.approx(flips / (4 * mine.sum()))
        weighted = quality.flipped_gap[mine].sum() / quality.gap[mine].sum()
        assert part.misranking.weighted == pytest.approx(weighted, rel=1e-5)
    empty = {x.slice.name for x in report.slices}
    assert len(report.slices) == len(empty) < len(slices)


def test_percentiles_are_within_their_promise():
    sums, _, _, quality, _ = summed()
    overall = sums.report((), ()).overall
    for got, share in ((overall.kl_p50, 0.5), (overall.kl_p99, 0.99)):
        want = np.percentile(quality.kl, 100 * share, method="inverted_cdf")
        assert got == pytest.approx(want, rel=0.06)


def test_the_attention_error_is_relative_and_by_head():
    sums, slices, *_ = summed()
    error = np.zeros((2, len(slices), 2))
    norm = np.ones((2, len(slices), 2))
    error[1, 0] = [0.04, 0.16]
    sums.add_attention(error, norm)
    report = sums.report((), ())
    assert report.attention_error[1] == pytest.approx((0.2, 0.4))
    assert report.overall.attention_error == pytest.approx((0, np.sqrt(0.1)))


def curve(slope, *, noise=0.01, seed=0, number=2000):
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 1000, number).astype(np.int32)
    kl = 0.05 + slope * positions / 1000 + rng.normal(scale=noise, size=number)
    sums = CurveSums("context", position_edges(1000))
    for part in np.array_split(np.arange(number), 7):
        sums.add(positions[part], kl[part].astype(np.float32), kl[part] > 0)
    return positions, kl, sums.report()


def test_a_curve_has_the_slope_of_least_squares():
    positions, kl, got = curve(0.04)
    slope, error = np.polyfit(positions / 1000, kl, 1, cov=True)
    assert got.slope == pytest.approx(slope[0], rel=1e-4)
    assert got.slope_error == pytest.approx(np.sqrt(error[0, 0]), rel=1e-2)
    assert got.accumulates
    assert sum(got.num_tokens) == 2000
    first = positions < got.edges[1]
    assert got.kl_mean[0] == pytest.approx(kl[first].mean(), rel=1e-5)


def test_an_error_that_stays_flat_is_not_said_to_accumulate():
    # 40 runs at 3 standard errors: 0.05 false alarms expected.
    assert not any(curve(0.0, seed=seed)[2].accumulates for seed in range(40))
    assert not curve(-0.04)[2].accumulates


def test_a_curve_of_too_few_positions_has_no_slope():
    sums = CurveSums("generated", position_edges(8))
    sums.add(np.arange(3, dtype=np.int32), np.ones(3, np.float32), np.ones(3, bool))
    assert sums.report().slope is None
    assert not sums.report().accumulates


def test_the_worst_tokens_are_the_worst_whatever_the_order():
    values = np.random.default_rng(0).permutation(50).astype(float)
    worst = WorstTokens(4)
    for kl in values:
        worst.offer(
            WorstToken(
                sample="x",
                data_class="chat",
                language="en",
                position=int(kl),
                kl=float(kl),
                context="",
                next_token="",
                full_top="",
                full_probability=1.0,
                fp8_top="",
                fp8_probability=1.0,
            )
        )
    assert [token.kl for token in worst.report()] == [49, 48, 47, 46]
    assert worst.least == 46
