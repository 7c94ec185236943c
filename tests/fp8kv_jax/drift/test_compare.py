"""Two artifacts side by side: the bootstrap, the verdict, quality, timing, the command."""

import dataclasses
import functools
import itertools
import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_examples as example

import models.loading
from fp8kv_jax.cli.main import run
from fp8kv_jax.drift.compare import (
    COLUMNS,
    Candidate,
    PairedQuality,
    judge_quality,
    perplexities,
)
from fp8kv_jax.drift.compare_result import Bounds, conclude, judge
from fp8kv_jax.drift.compare_statistics import Estimate, paired_bootstrap
from fp8kv_jax.drift.compare_timing import PairedTiming, judge_timing
from fp8kv_jax.scales.artifact import read_artifact, write_artifact

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
_LOAD = models.loading.load_model


def weighted_means(sums):
    return sums[..., 1] / sums[..., 0], sums[..., 2] / sums[..., 0]


def sample_rows(number, *, gain=0.0, seed=0):
    """Weights, and what A and B lose: hard prompts are hard for both."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(5, 50, number).astype(float)
    hard = rng.exponential(1.0, number)
    a = hard + rng.normal(0, 0.1, number)
    b = hard + gain + rng.normal(0, 0.1, number)
    return np.stack([weight, weight * a, weight * b], axis=1)


def test_the_bootstrap_agrees_with_a_plain_loop():
    rows = sample_rows(40, gain=0.05)
    figures = paired_bootstrap(
        rows, weighted_means, change="relative", draws=4000, seed=3
    )
    pick = random.Random(1)
    drawn = []
    for _ in range(4000):
        chosen = [pick.choice(rows.tolist()) for _ in rows]
        a, b = (sum(r[i] for r in chosen) / sum(r[0] for r in chosen) for i in (1, 2))
        drawn.append((a, b, b / a - 1))
    # Two sets of 4,000 draws: their percentiles differ by chance, by about 3 % of the
    # interval's width (the density at the ends is 0.06 / sd, so sd / 0.06 * sqrt(0.025
    # * 0.975 / 4000) = 0.04 sd each, of a width of 4 sd); 6 % is allowed.
    for estimate, values in zip(figures, zip(*drawn, strict=True), strict=True):
        low, high = np.quantile(values, (0.025, 0.975))
        assert estimate.low == pytest.approx(low, abs=0.06 * (high - low))
        assert estimate.high == pytest.approx(high, abs=0.06 * (high - low))
        assert estimate.low < estimate.value < estimate.high
    weight, a, b = rows.sum(axis=0)
    assert figures[0].value == pytest.approx(a / weight)
    assert figures[2].value == pytest.approx(b / a - 1)


def test_pairing_takes_out_what_is_hard_for_both():
    rows = sample_rows(40, gain=0.05)
    a, _, change = paired_bootstrap(rows, weighted_means, change="difference")
    # The spread of prompts is 10 times that of the difference; unpaired, the interval
    # of the difference would be wider than that of A.
    assert change.high - change.low < (a.high - a.low) / 3


def test_the_interval_covers_the_truth_as_often_as_it_says():
    covered = []
    for seed in range(400):
        rows = sample_rows(40, gain=0.05, seed=seed)
        change = paired_bootstrap(
            rows, weighted_means, change="difference", draws=400, seed=seed
        )[2]
        covered.append(change.low <= 0.05 <= change.high)
    # 95 % nominal; percentile intervals of 40 rows reach about 93 %, and 400 trials
    # have a standard error of 1.2 %.
    assert 0.895 <= np.mean(covered) <= 0.985


def test_one_seed_gives_one_interval():
    rows = sample_rows(10)
    first, again, other = (
        paired_bootstrap(rows, weighted_means, change="difference", seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other


def measure(value, low, high, *, name="kl_mean", bound=0.1, **changes):
    change = Estimate(value=value, low=low, high=high)
    figures = (Estimate(value=1.0), Estimate(value=1.0), change)
    return judge(
        figures,
        name=name,
        unit="",
        change_kind="difference",
        bound=bound,
        **changes,
    )


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ((-0.2, -0.3, -0.1), "better"),
        ((0.0, -0.05, 0.05), "within"),
        ((0.06, 0.02, 0.1), "within"),
        ((0.0, None, None), "within"),
        ((0.09, 0.05, 0.13), "unclear"),
        ((0.0, -0.5, 0.5), "unclear"),
        ((0.2, -0.1, 0.5), "unclear"),
        ((0.2, 0.05, 0.35), "worse"),
        ((0.2, None, None), "worse"),
    ],
)
def test_a_change_is_held_against_its_bound(interval, outcome):
    assert measure(*interval).outcome == outcome
    mirrored = [None if x is None else -x for x in interval]
    if mirrored[1] is not None:
        mirrored = [mirrored[0], mirrored[2], mirrored[1]]
    assert measure(*mirrored, higher_is_better=True).outcome == outcome


def test_any_loss_counts_then_any_doubt_then_a_gain_of_merit():
    better, within = measure(-0.2, -0.3, -0.1), measure(0.0, 0.0, 0.0)
    unclear, worse = measure(0.0, -0.5, 0.5), measure(0.2, 0.15, 0.3)
    faster = measure(0.2, 0.1, 0.3, name="tokens_per_s", higher_is_better=True)
    assert conclude([better, within, unclear, worse]) == "worse"
    assert conclude([better, within, unclear]) == "unclear"
    assert conclude([better, within]) == "better"
    assert faster.outcome == "better"
    assert conclude([within, faster]) == "no_worse"


def test_a_bound_that_is_no_bound_is_refused():
    with pytest.raises(
        ValueError, match="bound on kl to be a number from 0 on, got -1"
    ):
        Bounds(kl=-1)
    with pytest.raises(ValueError, match="bound on speed"):
        Bounds(speed=float("nan"))


@pytest.fixture(scope="module")
def params():
    return example.init_params()


@pytest.fixture(scope="module")
def scales(params):
    return example.calibrate(params)


def shrunk(scales, factor):
    """Scales too small by a factor: values far beyond their range are clipped."""
    names = [f"{x}_{y}" for x in "kv" for y in ("scale", "amax")]
    small = {name: getattr(scales, name) / np.float32(factor) for name in names}
    inverse = {f"{x}_inv_scale": np.float32(1) / small[f"{x}_scale"] for x in "kv"}
    return dataclasses.replace(scales, **small, **inverse)


def score(params, *candidates, number=9, tokens_per_step=256):
    cache = example.cache_config()
    run = PairedQuality(
        example.forward,
        params,
        *(Candidate(scales=x, cache=cache) for x in candidates),
        wide_dtype="float32",
        max_tokens=example.MAX_TOKENS,
        tokens_per_step=tokens_per_step,
    )
    prompts = [text.token_ids for text in example.texts(number)]
    steps = list(run.run(prompts))
    assert steps == sorted(steps)
    assert steps[-1] == sum(map(len, prompts))
    return prompts, np.stack(run.rows)


def test_full_precision_sums_equal_a_pass_without_a_cache(params, scales):
    prompts, rows = score(params, scales, scales)
    total = 0.0
    for ids, row in zip(prompts, rows, strict=True):
        logits = example.record_rows(params, ids)[1][:-1]
        log_probability = jax.nn.log_softmax(jnp.asarray(logits), axis=1)
        nll = -np.asarray(log_probability)[np.arange(len(ids) - 1), ids[1:]].sum()
        total += nll
        sums = dict(zip(COLUMNS, row, strict=True))
        assert (sums["tokens"], sums["labels"]) == (len(ids), len(ids) - 1)
        # Sums of at most 96 float32 terms of size 1 to 10.
        assert sums["nll_full"] == pytest.approx(nll, rel=1e-5)
        assert 0 < sums["kl_a"] == sums["kl_b"]
    labels = sum(len(ids) - 1 for ids in prompts)
    assert perplexities(rows).full == pytest.approx(np.exp(total / labels), rel=1e-5)


def test_how_prompts_share_steps_changes_nothing(params, scales):
    small = shrunk(scales, 64)
    together, alone = (
        score(params, scales, small, tokens_per_step=n)[1] for n in (256, 64)
    )
    # The same sums, in another order of additions within the matrix products.
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-5)


def test_equal_artifacts_show_no_difference(params, scales):
    _, rows = score(params, scales, scales)
    measures = judge_quality(rows, Bounds(), draws=500, seed=0)
    assert [m.name for m in measures] == [
        "kl_mean",
        "top1_agreement",
        "perplexity_drift",
    ]
    for m in measures:
        assert (m.change.low, m.change.value, m.change.high) == (0, 0, 0)
        assert m.a == m.b
    assert conclude(measures) == "no_worse"


def test_scales_that_clip_are_found_worse_and_their_mending_better(params, scales):
    small = shrunk(scales, 64)
    _, rows = score(params, scales, small)
    measures = {m.name: m for m in judge_quality(rows, Bounds(), draws=500, seed=0)}
    kl = measures["kl_mean"]
    assert kl.outcome == "worse"
    assert kl.b.value > 20 * kl.a.value
    assert measures["top1_agreement"].outcome == "worse"
    assert conclude(list(measures.values())) == "worse"
    _, rows = score(params, small, scales)
    assert conclude(judge_quality(rows, Bounds(), draws=500, seed=0)) == "better"


def test_a_perplexity_below_full_precision_is_drift_as_well():
    rows = np.ones((20, len(COLUMNS)))
    for name, nll in (("nll_full", 3.0), ("nll_a", 2.9), ("nll_b", 3.01)):
        rows[:, COLUMNS.index(name)] = nll
    drift = judge_quality(rows, Bounds(), draws=100, seed=0)[2]
    assert drift.a.value == pytest.approx(1 - np.exp(-0.1))
    assert drift.b.value == pytest.approx(np.exp(0.01) - 1)
    assert drift.outcome == "better"
    found = perplexities(rows)
    assert (found.full, found.a) == pytest.approx((np.exp(3.0), np.exp(2.9)))


def test_a_model_that_fails_is_reported(params, scales):
    broken = params | {"embedding": params["embedding"] * jnp.nan}
    with pytest.raises(ValueError, match="Expected finite logits, got NaN or Inf"):
        score(broken, scales, scales)


def test_prompts_of_one_token_have_no_perplexity():
    rows = np.ones((3, len(COLUMNS)))
    rows[:, COLUMNS.index("labels")] = 0
    assert perplexities(rows) is None
    measures = judge_quality(rows, Bounds(), draws=100, seed=0)
    assert [m.name for m in measures] == ["kl_mean", "top1_agreement"]


def test_rounds_alternate_who_goes_first_and_load_is_equal(params, scales, monkeypatch):
    cache = example.cache_config()
    small = shrunk(scales, 64)
    candidates = [Candidate(scales=x, cache=cache) for x in (scales, small)]
    prompts = [text.token_ids[:20] for text in example.texts(4)]
    ticks = itertools.count()
    run = PairedTiming(
        example.forward,
        params,
        tuple(candidates),
        prompts,
        max_new_tokens=5,
        concurrency=2,
        clock=lambda: float(next(ticks)),
    )
    order = []
    time_one = run._time

    def note(generator, group):
        order.append(run._generators.index(generator))
        return time_one(generator, group)

    monkeypatch.setattr(run, "_time", note)
    assert list(run.run(2)) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert run.num_runs(2) == 10
    assert order == [0, 1, 0, 1, 1, 0, 1, 0, 0, 1]
    # The clock ticks at the start, at each of 2 * 5 tokens, and at the end. The first
    # tokens come at ticks 1 and 2; then the two take turns: 2 ticks a token, one more
    # or less for the step in which the prefills end.
    a, b = run.rows[0][:6], run.rows[0][6:]
    assert a.tolist() == b.tolist()
    assert a[:5].tolist() == [2, 10, 11, 3, 2]
    assert a[5] == pytest.approx((9 - 1) / 4 + (10 - 2) / 4)


def test_a_slower_run_is_found_worse():
    rng = np.random.default_rng(0)
    a = np.array([4, 32, 2.0, 1.0, 4, 0.2]) * rng.uniform(0.98, 1.02, (16, 1))
    b = a * np.array([1, 1, 1.5, 1.3, 1, 1.01])
    rows = np.concatenate([a, b], axis=1)
    rows[:, [0, 1, 4, 6, 7, 10]] = 4
    measures = judge_timing(rows, Bounds(speed=0.1), draws=500, seed=0)
    assert [(m.name, m.outcome) for m in measures] == [
        ("tokens_per_s", "worse"),
        ("time_to_first_token", "worse"),
        ("time_per_output_token", "within"),
    ]
    assert measures[0].change.value == pytest.approx(1 / 1.5 - 1)
    rows[:, [4, 10]] = 0  # outputs of one token
    assert len(judge_timing(rows, Bounds(), draws=500, seed=0)) == 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A workload and two artifacts: one that fits, and one that clips."""
    folder = tmp_path_factory.mktemp("compare")
    rng = np.random.default_rng(0)
    lines = [
        " ".join(f"w{i}" for i in rng.integers(0, 99, n % 5 + 4)) for n in range(9)
    ]
    chat = {"messages": [{"role": "user", "content": "hi"}], "class": "chat"}
    samples = [{"prompt": line} for line in lines] + [chat] * 3
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (folder / "w.jsonl").write_text(text)
    (folder / "text.txt").write_text("\n".join(lines))
    data = ("--data", f"prose={folder / 'text.txt'}", "--model", str(TINY))
    out = ("--out", str(folder / "head"), "--granularity", "head", "--headroom", "4")
    assert run(["calibrate", *data, *out]) == 0
    scale_set, manifest = read_artifact(folder / "head")
    manifest = dataclasses.replace(manifest, scales_sha256=None)
    write_artifact(folder / "small", shrunk(scale_set, 64), manifest)
    return folder


@functools.cache
def _load_once(path, dtype):
    return _LOAD(path, jnp.dtype(dtype))


@pytest.fixture
def cli(command_line, files, monkeypatch):
    monkeypatch.setattr(models.loading, "load_model", _load_once)

    def compare(a, b, *more, workload="w.jsonl"):
        arguments = ["compare", files / a, files / b, "--workload", files / workload]
        arguments += ["--model", TINY, "--max-new-tokens", 3, "--tokens-per-step", 128]
        return command_line(*arguments, *more)

    return compare


# Times on a busy machine are no matter of these tests.
ANY_SPEED = ("--max-slowdown", 1e9)
ALL_TO_ALL = ("--max-kl-increase", 0.05, "--max-top1-drop", 1)


def test_json_holds_both_sides_and_every_measure(cli):
    code, out, err = cli("head", "head", *ANY_SPEED, "--json", "--repeats", 1)
    assert code == 0, err
    found = json.loads(out)
    assert found["verdict"] == "no_worse"
    assert found["schema_version"] == 1
    assert (found["num_prompts"], found["num_rounds"]) == (12, 3)
    assert found["a"] == found["b"]
    assert found["a"]["preemptions"] == 0
    measures = {m["name"]: m for m in found["measures"]}
    assert list(measures) == [
        *("kl_mean", "top1_agreement", "perplexity_drift", "cache_bytes"),
        *("tokens_per_s", "time_to_first_token", "time_per_output_token"),
    ]
    assert measures["kl_mean"]["change"] == {"value": 0, "low": 0, "high": 0}
    assert measures["cache_bytes"]["change"]["value"] == 0
    assert measures["cache_bytes"]["change"]["low"] is None
    for name in list(measures)[4:]:
        m = measures[name]
        assert 0 < m["a"]["low"] <= m["a"]["value"] <= m["a"]["high"]


def test_scales_that_clip_end_with_1(cli):
    bounds = ("--max-kl-increase", 1e-4, "--max-top1-drop", 1)
    code, out, err = cli("head", "small", "--repeats", 0, *bounds)
    assert (code, out) == (1, "")
    assert "worse: B is worse than A" in err
    assert "0 rounds timed" in err
    code, _, err = cli("small", "head", "--repeats", 0, *ALL_TO_ALL)
    assert code == 0, err


def test_too_few_prompts_to_tell_end_with_1(cli, monkeypatch):
    monkeypatch.setattr("fp8kv_jax.cli.compare.conclude", lambda measures: "unclear")
    code, _, err = cli("head", "small", "--repeats", 0)
    assert code == 1, err
    assert "unclear: the intervals are too wide" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", 1), "Expected --prompts of at least 2, got 1."),
        (("--draws", 10), "Expected --draws of at least 100, got 10."),
        (("--repeats", -1), "Expected --repeats of at least 0, got -1."),
        (("--max-slowdown", -1), "Expected the bound on speed"),
        (("--model", "none"), "none"),
    ],
)
def test_an_error_is_one_line_and_ends_with_2(cli, arguments, message):
    code, out, err = cli("head", "small", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fp8kv: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_trace_or_one_sample_is_no_workload(cli, files):
    code, _, err = cli("head", "small", workload="trace.safetensors")
    assert code == 2
    assert "Expected --workload with prompts, got the trace" in err
    (files / "one.jsonl").write_text('{"prompt": "w1 w2"}\n')
    code, _, err = cli("head", "small", workload="one.jsonl")
    assert code == 2
    assert "Expected at least 2 samples" in err


def test_an_artifact_of_another_model_is_refused(cli, files, tmp_path):
    shutil.copytree(files / "head", tmp_path / "other")
    scale_set, manifest = read_artifact(files / "head")
    other = dataclasses.replace(manifest.model, weights_sha256="0" * 64)
    manifest = dataclasses.replace(manifest, model=other, scales_sha256=None)
    write_artifact(tmp_path / "new", scale_set, manifest)
    code, _, err = cli("head", tmp_path / "new")
    assert code == 2
    assert "weights" in err
    code, _, err = cli(
        "head", tmp_path / "new", "--allow-mismatch", "a test", "--repeats", 0
    )
    assert code == 0, err
    assert "B: allowed: " in err
