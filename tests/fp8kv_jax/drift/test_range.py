"""Range tables against plain numpy, and flags against planted faults."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import replay_examples as example

from fp8kv_jax.drift.range import RangeSums, SavedRange, read_range
from fp8kv_jax.drift.telemetry import bin_edges


def test_readings_equal_a_plain_count():
    rng = np.random.default_rng(0)
    rows = rng.lognormal(sigma=6, size=(60, 2, 8)).astype(np.float32)
    rows *= rng.choice([-1, 0, 1], rows.shape)
    rows[3, 1, 2], rows[5, 0, 0] = np.nan, -np.inf
    # Either side of what counts as saturated, 464, and of what becomes zero, 2^-10.
    rows[7, 0, :4] = 2 * np.array([456, 464, 466, 2**-10])
    inverse = np.array([0.5, 20.0], np.float32)
    ids = np.stack([np.zeros(60, np.int32), rng.integers(1, 4, 60)], axis=1)
    ids[50:] = 4  # padding
    ids = ids.astype(np.int32)
    got = jax.device_get(
        read_range(jnp.asarray(rows), inverse, jnp.asarray(ids), num_slices=4)
    )
    x = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    y = np.abs(x) * inverse[None, :, None]
    finite = np.isfinite(x)
    edges = (bin_edges() * 448).astype(np.float32)
    for index in range(4):
        mine = (ids == index).any(axis=1)
        for head in range(2):
            a, b, good = x[mine, head], y[mine, head], finite[mine, head]
            saturated = good & (b > 464)
            counts = [
                saturated.sum(),
                saturated.any(axis=1).sum(),
                (good & (a != 0) & (b <= 2**-10)).sum(),
                (~good).sum(),
            ]
            np.testing.assert_array_equal(got.counts[index, head], counts)
            assert got.amax[index, head] == np.abs(a[good]).max()
            bins = np.bincount(np.searchsorted(edges, b[good]), minlength=len(edges))
            np.testing.assert_array_equal(got.histogram[index, head], bins)
    assert got.counts[0, :, 0].all()
    assert got.counts[0, :, 2].all()


@functools.partial(jax.jit, static_argnums=3)
def _read(rows, inverses, ids, num_slices):
    read = functools.partial(read_range, num_slices=num_slices)
    by_layer = jax.vmap(read, in_axes=(0, 0, None))
    return jax.vmap(by_layer, in_axes=(0, 0, None))(rows, inverses, ids)


def ranges(params, scales, sequences):
    """Range sums of some texts, straight from the model's rows."""
    slices = example.slices_of()
    layers = tuple(range(example.NUM_LAYERS))
    saved = SavedRange.of(scales, example.NUM_KV_HEADS, layers)
    sums = RangeSums(saved, slices, head_dim=example.HEAD_DIM)
    for sequence in sequences:
        ids = np.full((example.MAX_TOKENS, 5), len(slices), np.int32)
        size = len(sequence.token_ids)
        ids[:size] = slices.of_tokens(
            data_class=sequence.data_class,
            language=sequence.language,
            prompt_length=size,
            positions=np.arange(size, dtype=np.int32),
        )
        rows = example.record_rows(params, sequence.token_ids)[0]
        padding = [(0, 0), (0, 0), (0, example.MAX_TOKENS - size), (0, 0), (0, 0)]
        reading = _read(np.pad(rows, padding), saved.inv_scale, ids, len(slices))
        counts = np.zeros(len(slices), np.int64)
        np.add.at(counts, ids[:size], 1)
        sums.add(jax.device_get(reading), counts)
    return sums


@pytest.fixture(scope="module")
def params():
    return example.init_params()


@pytest.fixture(scope="module", params=["head", "tensor"])
def scales(request, params):
    return example.calibrate(params, granularity=request.param)


def places(sums):
    return {(x.kind, x.tensor, x.layer, x.head) for x in sums.flags()}


def test_twenty_clean_runs_raise_no_flag(params, scales):
    found = [
        places(ranges(params, scales, example.texts(4, seed=s))) for s in range(20)
    ]
    assert found == [set()] * 20


def test_an_outlier_head_is_found_and_nothing_else(params, scales):
    # Its queries shrink by as much, so that nothing downstream changes.
    gain = params["k_gain"].at[2, 1].set(20.0)
    loud = params | {"k_gain": gain}
    loud["q"] = params["q"].at[2, :, 2:].divide(20.0)
    sums = ranges(loud, scales, example.texts(4))
    want = {("drifted", "k", 2, 1), ("clipped", "k", 2, 1)}
    if scales.granularity == "tensor":
        want.add(("outlier_head", "k", 2, 1))
    assert places(sums) == want


def test_an_outlier_head_that_was_calibrated_costs_only_a_shared_scale(params):
    loud = params | {"k_gain": params["k_gain"].at[2, 1].set(20.0)}
    loud["q"] = params["q"].at[2, :, 2:].divide(20.0)
    for granularity, want in (
        ("head", set()),
        ("tensor", {("outlier_head", "k", 2, 1)}),
    ):
        scales = example.calibrate(loud, granularity=granularity)
        assert places(ranges(loud, scales, example.texts(4))) == want


def test_a_drifting_layer_is_found_inside_its_headroom(params, scales):
    # The last layer, whose output feeds no other keys and values.
    drifted = params | {"v_gain": params["v_gain"].at[3].set(1.8)}
    sums = ranges(drifted, scales, example.texts(4))
    assert places(sums) <= {("drifted", "v", 3, 0), ("drifted", "v", 3, 1)}
    assert ("drifted", "v", 3) in {x[:3] for x in places(sums)}
    assert sums.saturated_share == 0


def test_a_clipped_row_is_found_with_its_exact_count(params, scales):
    loud = params | {"loud": params["loud"].at[3, 0].set(1000.0)}
    sums = ranges(loud, scales, example.texts(4, loud=True))
    want = {("clipped", "v", 3, 0), ("drifted", "v", 3, 0)}
    if scales.granularity == "tensor":
        want.add(("outlier_head", "v", 3, 0))
    assert places(sums) == want
    report = sums.report(fp8_run_saturated=None)
    assert report.overall.v.saturated[3] == (example.HEAD_DIM, 0)
    assert report.overall.v.saturated_tokens[3] == (1, 0)
    by_class = {x.slice.name: x.v.saturated[3][0] for x in report.slices[1:3]}
    assert by_class == {"chat": example.HEAD_DIM, "code": 0}
    values = 2 * 4 * 2 * example.HEAD_DIM * report.overall.slice.num_tokens
    assert sums.saturated_share == example.HEAD_DIM / values
    assert (
        report.flags[0].words == "V of layer 3, head 0: 8 saturated values in 1 token"
    )


def test_an_unknown_calibrated_amax_has_no_ratio(params, scales):
    unknown = type(scales).from_scales(
        {i: (scales.k_scale[i], scales.v_scale[i]) for i in range(4)},
        granularity=scales.granularity,
    )
    report = ranges(params, unknown, example.texts(2)).report(fp8_run_saturated=None)
    assert report.k_calibrated_amax[0] == (None, None)
    assert report.overall.k.ratio[0] == (None, None)
    assert not report.flags
