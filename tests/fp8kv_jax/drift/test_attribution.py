"""Attribution: planted losses are found where they are, and what helps is measured."""

import numpy as np
import pytest
import replay_examples as example

from fp8kv_jax.drift.attribution import (
    Attributor,
    describe_drifts,
    fitted_scales,
    recommend,
)
from fp8kv_jax.drift.loss_sample import LossSample
from fp8kv_jax.drift.result_loss import HighPrecisionTrial

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def params():
    return example.init_params()


@pytest.fixture(scope="module")
def good(params):
    return example.calibrate(params)


@pytest.fixture(scope="module")
def samples():
    return [s.token_ids[:32] for s in example.texts(6, longest=40)]


def attribute(params, scales, samples, good, *, max_kl=None, by_head=True, **changes):
    sample = LossSample(
        example.forward,
        params,
        samples,
        cache=example.cache_config(**changes),
        wide_dtype="float32",
        scales=scales,
        tokens_per_step=128,
    )
    attributor = Attributor(
        sample,
        live_amax=np.stack([good.k_amax, good.v_amax]),
        saturated_share=0.0,
        max_kl=max_kl,
        by_head=by_head,
    )
    passes = list(attributor.run())
    assert passes == list(range(1, attributor.num_passes + 1))
    return attributor


def damaged(good, layer, head, *, factor=1 / 64):
    """Scales that clip V of one head to a 32nd of its range."""
    amax = np.stack([good.k_amax, good.v_amax]).copy()
    amax[1, layer, head] *= factor
    return example.scales_from(amax)


@pytest.fixture(scope="module")
def planted(params, good, samples):
    # The bound lies between the loss of all layers and that of the sound ones.
    return attribute(params, damaged(good, 1, 0), samples, good, max_kl=2e-3)


def test_the_damaged_layer_and_head_explain_the_loss(planted, samples):
    num_tokens = sum(map(len, samples))
    found = planted.attribution
    worst = max(found.layers, key=lambda x: x.kl_mean)
    assert worst.layer == 1
    assert worst.share > 0.9
    assert worst.head_kl[0] > 20 * worst.head_kl[1]
    assert sum(x.share for x in found.layers) == pytest.approx(1)
    assert worst.kl_mean == pytest.approx(found.kl_mean, rel=0.2)
    assert (found.num_samples, found.num_tokens) == (6, num_tokens)


def test_keeping_it_wide_is_recommended_with_measured_gain_and_exact_cost(planted):
    found = planted.attribution
    assert found.recommended == (1,)
    (trial,) = found.trials
    assert trial.layers == (1,)
    assert trial.kl_mean < 2e-3 < found.kl_mean
    # K and V of 2 heads of 8: 32 values, a byte more each.
    assert trial.extra_bytes_per_token == 32
    assert trial.bytes_per_token == 4 * 32 + 32
    assert "--kv-high-precision-layers 1: mean KL" in found.recommendation


def test_fitted_scales_win_the_loss_of_bad_ones_back(planted):
    drifts = planted.drifts
    assert drifts.kl_saved == planted.attribution.kl_mean
    assert drifts.kl_fitted < drifts.kl_saved / 20
    assert drifts.kl_from_scales == drifts.kl_saved - drifts.kl_fitted
    saved, head, tensor = planted.attribution.scales
    assert (saved.name, head.name, tensor.name) == ("saved", "live_head", "live_tensor")
    assert saved.saturated_share > 0
    assert head.saturated_share == tensor.saturated_share == 0
    assert saved.local_attention_error[1] > 5 * head.local_attention_error[1]
    # The damage is in layer 1 alone, when every layer is given sound inputs.
    others = [0, 2, 3]
    before = np.array(saved.local_attention_error)[others]
    after = np.array(head.local_attention_error)[others]
    np.testing.assert_allclose(before, after, rtol=0.5)
    assert (head.scale_bytes, tensor.scale_bytes) == (4 * 2 * 16, 4 * 16)


def test_sound_scales_leave_only_what_rounding_costs(params, good, samples):
    found = attribute(params, good, samples, good, max_kl=0.02, by_head=False)
    assert found.attribution.recommended == ()
    assert "meets the bound" in found.attribution.recommendation
    assert abs(found.drifts.kl_from_scales) < 0.5 * found.drifts.kl_fitted
    assert "No value leaves the saved range" in found.drifts.words
    assert all(x.head_kl is None for x in found.attribution.layers)


def test_one_scale_a_layer_follows_its_loudest_head():
    amax = np.ones((2, 3, 2), np.float32)
    amax[1, 2, 1] = 4096
    head, tensor = fitted_scales(amax)
    assert head[1, 2, 0] == head[0, 0, 0]
    assert tensor[1, 2, 0] == tensor[1, 2, 1] == head[1, 2, 1]


def test_the_two_drifts_are_told_apart_in_words():
    assert describe_drifts(0.0, 0.02, 0.03) == (
        "No value leaves the saved range. The mean KL on the sample is 0.02 nats; "
        "scales made from this very traffic do no better (0.03): it is what rounding "
        "costs."
    )
    assert describe_drifts(1e-3, 0.05, 0.02) == (
        "0.001 of the values leave the saved range. The mean KL on the sample is 0.05 "
        "nats; 0.02 remains with scales made from this very traffic, which is what "
        "rounding costs: better scales would win back 0.03."
    )


def test_groups_without_signal_get_the_provisional_scale():
    head, tensor = fitted_scales(np.zeros((2, 3, 2), np.float32))
    assert (head == 2).all()
    assert (tensor == 2).all()


def trial(kl, *layers):
    return HighPrecisionTrial(
        layers=layers,
        kl_mean=kl,
        top1_agreement=0.9,
        bytes_per_token=100,
        extra_bytes_per_token=10 * len(layers),
    )


def test_the_smallest_set_that_meets_the_bound_is_recommended():
    trials = [trial(0.05, 3), trial(0.01, 3, 4), trial(0.005, 1, 3, 4, 7)]
    assert recommend(0.1, trials, 0.02)[0] == (3, 4)
    assert recommend(0.01, trials, 0.02)[0] == ()
    assert recommend(0.1, trials, None)[0] == ()
    layers, words = recommend(0.1, trials, 0.001)
    assert layers == ()
    assert "the best has a mean KL of 0.005" in words
