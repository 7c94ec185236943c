"""Formats on a sample: what they lose agrees with real caches, their bytes are exact."""

import numpy as np
import pytest
import replay_examples as example

from fp8kv_jax.drift.attribution import Attributor
from fp8kv_jax.drift.format_trials import FormatTrials
from fp8kv_jax.drift.formats import FORMATS
from fp8kv_jax.drift.loss_sample import LossSample

NAMES = ("fp8_head", "int8_token_head", "int4_token_head")

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def params():
    return example.init_params()


@pytest.fixture(scope="module")
def scales(params):
    return example.calibrate(params)


def make_sample(params, scales, **changes):
    return LossSample(
        example.forward,
        params,
        [s.token_ids[:32] for s in example.texts(6, longest=40)],
        cache=example.cache_config(**changes),
        wide_dtype="float32",
        scales=scales,
        tokens_per_step=128,
    )


def live_amax(scales):
    return np.stack([scales.k_amax, scales.v_amax])


def try_formats(sample, names, amax):
    trials = FormatTrials(sample, [FORMATS[name] for name in names], live_amax=amax)
    assert list(trials.run()) == list(range(1, trials.num_passes + 1))
    return trials.report


@pytest.fixture(scope="module")
def sample(params, scales):
    return make_sample(params, scales)


@pytest.fixture(scope="module")
def report(sample, scales):
    return try_formats(sample, NAMES, live_amax(scales))


def test_formats_lose_in_the_order_of_their_bits(report, sample):
    assert [x.name for x in report.trials] == list(NAMES)
    assert (report.num_samples, report.num_tokens) == (6, sample.num_tokens)
    _, int8, int4 = report.trials
    assert 0 < int8.kl_mean < int4.kl_mean / 16
    for fine, coarse in zip(
        int8.local_attention_error, int4.local_attention_error, strict=True
    ):
        # 17 times the step.
        assert 8 < coarse / fine < 32
    assert int8.top1_agreement > int4.top1_agreement


def test_a_static_format_loses_what_the_cache_itself_loses(report, sample, scales):
    attributor = Attributor(
        sample, live_amax=live_amax(scales), saturated_share=0.0, max_kl=None
    )
    list(attributor.run())
    cached = attributor.attribution.scales[1]
    assert cached.name == "live_head"
    form = report.trials[NAMES.index("fp8_head")]
    assert form.kl_mean == pytest.approx(cached.kl_mean, rel=0.01)
    assert form.local_attention_error == pytest.approx(
        cached.local_attention_error, rel=0.01
    )
    assert form.code_bytes_per_token == sample.cache.bytes_per_token
    assert form.fixed_metadata_bytes == cached.scale_bytes


def test_bytes_are_those_of_codes_and_metadata(report):
    # K and V of 4 layers of 2 heads are 16 rows of 8 values.
    assert [
        (x.code_bytes_per_token, x.metadata_bytes_per_token, x.fixed_metadata_bytes)
        for x in report.trials
    ] == [
        (128, 0, 16 * 8),
        (128, 16 * 4, 0),
        (64, 16 * 4, 0),
    ]
    assert report.trials[-1].bytes_per_token == 128


def test_layers_kept_wide_are_neither_rounded_nor_counted(params, scales):
    sample = make_sample(params, scales, high_precision_layers=(0, 1, 3))
    amax = live_amax(scales)[:, [2]]
    report = try_formats(sample, ["int4_token_head"], amax)
    (trial,) = report.trials
    errors = trial.local_attention_error
    assert report.layers == (2,)
    assert (errors[0], errors[1], errors[3]) == (0, 0, 0)
    assert errors[2] > 0.01
    assert trial.bytes_per_token == 4 * (4 + 4)
