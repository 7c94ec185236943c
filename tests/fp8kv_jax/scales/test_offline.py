"""Offline calibration: what is observed, how it merges, and that it can be resumed."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from fp8kv_jax.calibration import SCALE_MAX, SCALE_MIN
from fp8kv_jax.scales.corpus import DataSource
from fp8kv_jax.scales.offline import Compiling, Observed, OfflineCalibration
from fp8kv_jax.scales.processes import check_same, join, tell_start
from fp8kv_jax.scales.running_state import StateStore, fingerprint
from fp8kv_jax.scales.sample_plan import SamplePlan, make_plan
from fp8kv_jax.scales.scale_set import ScaleError
from fp8kv_jax.scales.statistics import AmaxState, init_state, make_scales, merge
from models.full_attention import full_attention

RUN = {"data": "x", "seed": 0}
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 2, 2, 8, 64


def init_params() -> dict[str, jax.Array]:
    """Keys and values of each token in each layer: what a sample holds is exact."""
    shape = (NUM_LAYERS, VOCAB, NUM_KV_HEADS, HEAD_DIM)
    k, v = jax.random.normal(jax.random.key(0), (2, *shape))
    return {"k": k, "v": v}


def forward(params, token_ids, positions, attend, carry, *, logits_at=None):
    """A model of attention alone, as `fp8kv_jax.decode.Forward`."""
    del positions
    for layer in range(NUM_LAYERS):
        k, v = params["k"][layer][token_ids], params["v"][layer][token_ids]
        options = {"softmax_scale": 0.3, "sliding_window": None, "logit_soft_cap": None}
        out, carry = attend(carry, layer, k, k, v, **options)
    out = out[jnp.arange(len(out)), logits_at] if logits_at is not None else out
    return out, carry


def plan_of(tmp_path, texts, *, max_seq_len=32) -> SamplePlan:
    """Samples whose token ids are the texts' bytes, less 32."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))

    def encode(text):
        return [byte - 32 for byte in text.encode()]

    source = DataSource(class_name="x", path=path)
    return make_plan([source], encode, num_samples=99, max_seq_len=max_seq_len, seed=0)


def words(number, seed=0, *, longest=40, low=3):
    """Texts of tokens from `low` to 63, which the tiny model has."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, number)
    return [bytes(rng.integers(32 + low, 96, n).tolist()).decode() for n in sizes]


def start_of(plan, run=RUN) -> AmaxState:
    return init_state(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        num_classes=len(plan.classes),
        fingerprint=fingerprint(run),
    )


def calibration_of(plan, *, params=None, state=None, **options) -> OfflineCalibration:
    return OfflineCalibration(
        forward,
        init_params() if params is None else params,
        full_attention,
        plan,
        state=start_of(plan) if state is None else state,
        **({"batch_size": 2} | options),
    )


def finish(calibration) -> AmaxState:
    list(calibration.run())
    return calibration.state


def equal(a: AmaxState, b: AmaxState) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def amax_by_hand(plan, params, name):
    """The largest value that BF16 makes of the tokens in the samples."""
    seen = sorted({i for sample in plan.samples for i in sample.token_ids.tolist()})
    rows = np.asarray(params[name].astype(jnp.bfloat16), np.float32)[:, seen]
    return np.abs(rows).max(axis=(1, 3))


# What is observed.


def test_the_amax_is_the_largest_of_all_samples(tmp_path):
    # Few tokens each, so that not every token is there.
    plan = plan_of(tmp_path, words(7, longest=5))
    state = finish(calibration_of(plan))
    params = init_params()
    assert np.array_equal(state.k_amax, amax_by_hand(plan, params, "k"))
    assert np.array_equal(state.v_amax, amax_by_hand(plan, params, "v"))
    everything = np.abs(params["k"]).max(axis=(1, 3))
    assert (state.k_amax < everything * 0.99).any()
    assert state.num_samples.tolist() == [7]
    assert state.num_tokens.tolist() == [plan.num_tokens]


@pytest.mark.parametrize("index", range(9))
def test_every_sample_counts(tmp_path, index):
    texts = [text.replace("R", "S") for text in words(9)]
    texts[index] += "R"
    plan = plan_of(tmp_path, texts, max_seq_len=64)
    params = init_params()
    params["v"] = params["v"].at[1, ord("R") - 32, 1, 3].set(-500.0)
    state = finish(calibration_of(plan, params=params))
    assert state.v_amax[1, 1] == 500
    assert state.v_amax[0].max() < 10


def test_padding_is_never_observed(tmp_path):
    plan = plan_of(tmp_path, words(5))
    assert any((plan.build(spec)[1] < spec.length).any() for spec in plan.batches(2))
    params = init_params()  # padding is token 0
    params = {name: x.at[:, 0].set(1e6) for name, x in params.items()}
    state = finish(calibration_of(plan, params=params))
    assert np.array_equal(state.k_amax, amax_by_hand(plan, params, "k"))
    assert state.k_amax.max() < 10
    assert state.v_amax.max() < 10


def test_attention_is_that_of_the_model_given(tmp_path):
    # The values of layer 1 are what layer 0 attended to.
    def stacked(params, token_ids, positions, attend, carry, *, logits_at=None):
        k, v = params["k"][0][token_ids], params["v"][0][token_ids]
        options = {"softmax_scale": 0.3, "sliding_window": None, "logit_soft_cap": None}
        out, carry = attend(carry, 0, k, k, v, **options)
        return attend(carry, 1, k, k, out, **options)

    plan = plan_of(tmp_path, words(1, longest=20))
    params = init_params()
    run = OfflineCalibration(
        stacked, params, full_attention, plan, batch_size=1, state=start_of(plan)
    )
    ids = jnp.asarray(plan.samples[0].token_ids)[None]
    k, v = params["k"][0][ids], params["v"][0][ids]
    options = {"softmax_scale": 0.3, "sliding_window": None, "logit_soft_cap": None}
    out, _ = full_attention(None, 0, k, k, v, **options)
    want = np.abs(out).max(axis=(0, 1, 3))
    # One rounding to BF16, half a step of 2^-8, and the order of sums.
    np.testing.assert_allclose(finish(run).v_amax[1], want, rtol=2**-8)


def test_what_is_not_finite_is_counted_and_never_an_amax(tmp_path):
    params = init_params()
    for token, value in ((0, np.nan), (1, -np.inf), (2, 3.4e38)):
        # The last one is finite in float32, and rounds to Inf in BF16.
        params["k"] = params["k"].at[:, token, 1, 3].set(value)
    plan = plan_of(tmp_path, [" ABC", "AB!", 'A"BC!'])
    state = finish(calibration_of(plan, params=params))
    assert state.k_nonfinite.tolist() == [[0, 4], [0, 4]]
    assert not state.v_nonfinite.any()
    assert state.k_amax.max() < 10


def test_amax_are_values_that_bf16_has(tmp_path):
    state = finish(calibration_of(plan_of(tmp_path, words(4))))
    for amax in (state.k_amax, state.v_amax):
        assert np.array_equal(amax.astype(jnp.bfloat16).astype(np.float32), amax)


def test_events_tell_shapes_and_progress(tmp_path):
    plan = plan_of(tmp_path, words(13))
    events = list(calibration_of(plan, batches_per_save=2).run())
    shapes = [event for event in events if isinstance(event, Compiling)]
    assert shapes == [
        Compiling(num_rows=r, length=n)
        for r, n in dict.fromkeys((s.num_rows, s.length) for s in plan.batches(2))
    ]
    done = [event for event in events if isinstance(event, Observed)]
    assert done == sorted(done)
    assert done[-1] == Observed(num_samples=13, num_tokens=plan.num_tokens)


@pytest.mark.parametrize("name", ["batch_size", "batches_per_save"])
def test_sizes_below_one_are_an_error(tmp_path, name):
    plan = plan_of(tmp_path, words(1))
    with pytest.raises(ValueError, match="Expected batch_size >= 1 and batches_per_"):
        calibration_of(plan, **{name: 0})


# How states merge.

_HEADS = (2, 3)


@st.composite
def states(draw):
    counts = st.integers(0, 2**40)
    sizes = st.floats(0, 2.0**100, width=32, allow_subnormal=False)

    def array(elements, shape, dtype):
        values = draw(st.lists(elements, min_size=6, max_size=6))
        return np.resize(np.array(values, dtype), shape)

    return AmaxState(
        k_amax=array(sizes, _HEADS, np.float32),
        v_amax=array(sizes, _HEADS, np.float32),
        k_nonfinite=array(counts, _HEADS, np.int64),
        v_nonfinite=array(counts, _HEADS, np.int64),
        num_tokens=array(counts, 2, np.int64),
        num_samples=array(counts, 2, np.int64),
        next_batch=array(counts, (), np.int64),
        fingerprint=np.frombuffer(fingerprint(RUN), np.uint8),
    )


@hypothesis.given(states(), states(), states())
@hypothesis.settings(max_examples=50, deadline=None)
def test_merging_is_associative_and_commutative_and_has_a_neutral(a, b, c):
    assert equal(merge(a, b), merge(b, a))
    assert equal(merge(merge(a, b), c), merge(a, merge(b, c)))
    nothing = init_state(
        num_layers=2, num_kv_heads=3, num_classes=2, fingerprint=fingerprint(RUN)
    )
    assert equal(merge(a, nothing), a)


def test_merging_takes_the_larger_amax_and_adds_counts():
    a = init_state(num_layers=1, num_kv_heads=2, num_classes=1, fingerprint=bytes(32))
    b = dataclasses.replace(a, k_amax=a.k_amax + 3, num_tokens=a.num_tokens + 5)
    both = merge(dataclasses.replace(b, k_amax=np.float32([[1, 7]])), b)
    assert both.k_amax.tolist() == [[3, 7]]
    assert both.num_tokens.tolist() == [10]


def test_states_of_different_runs_do_not_merge(tmp_path):
    plan = plan_of(tmp_path, words(1))
    other = start_of(plan, RUN | {"seed": 1})
    with pytest.raises(ValueError, match="Expected two states of one calibration run"):
        merge(start_of(plan), other)


# The running state on disk.


def test_a_run_that_stops_anywhere_goes_on_to_the_same_state(tmp_path):
    plan = plan_of(tmp_path, words(13, longest=16), max_seq_len=16)
    want = finish(calibration_of(plan))
    num_batches = len(plan.batches(2))
    for stop in range(num_batches):
        folder = tmp_path / f"state{stop}"
        with StateStore(folder, RUN) as store:
            run = calibration_of(plan, store=store, batches_per_save=2).run()
            observed = 0
            while observed < stop:
                observed += isinstance(next(run), Observed)
            run.close()
        with StateStore(folder, RUN) as store:
            state = store.load(start_of(plan))
            saved = 0 if state is None else int(state.next_batch)
            assert saved == stop // 2 * 2
            assert equal(finish(calibration_of(plan, state=state, store=store)), want)


def test_the_store_returns_what_it_was_given(tmp_path):
    plan = plan_of(tmp_path, words(3))
    state = dataclasses.replace(
        finish(calibration_of(plan)), num_tokens=np.array([2**40], np.int64)
    )
    with StateStore(tmp_path / "s", RUN) as store:
        assert store.load(start_of(plan)) is None
        store.save(state)
    with StateStore(tmp_path / "s", RUN) as store:
        loaded = store.load(start_of(plan))
    assert loaded is not None
    assert equal(loaded, state)
    assert loaded.num_tokens.dtype == np.int64


def test_a_save_that_was_cut_short_is_not_found(tmp_path):
    plan = plan_of(tmp_path, words(3))
    first = dataclasses.replace(start_of(plan), next_batch=np.array(1, np.int64))
    with StateStore(tmp_path / "s", RUN) as store:
        store.save(first)
        store.save(dataclasses.replace(first, next_batch=np.array(2, np.int64)))
    (tmp_path / "s" / "states" / "2").rename(
        tmp_path / "s" / "states" / "2.orbax-checkpoint-tmp"
    )
    with StateStore(tmp_path / "s", RUN) as store:
        loaded = store.load(start_of(plan))
        assert loaded is not None
        assert int(loaded.next_batch) == 1
        store.save(dataclasses.replace(first, next_batch=np.array(2, np.int64)))
        again = store.load(start_of(plan))
        assert again is not None
        assert int(again.next_batch) == 2


def test_a_damaged_state_is_an_error(tmp_path):
    plan = plan_of(tmp_path, words(1))
    with StateStore(tmp_path / "s", RUN) as store:
        store.save(start_of(plan))
    for path in (tmp_path / "s" / "states").rglob("*"):
        if path.is_file() and path.name != "commit_success.txt":
            path.write_bytes(path.read_bytes()[:10])
    with (
        StateStore(tmp_path / "s", RUN) as store,
        pytest.raises(ValueError, match=r"got a damaged one .* use --no-resume"),
    ):
        store.load(start_of(plan))


def test_the_state_of_another_run_is_refused_by_name(tmp_path):
    StateStore(tmp_path / "s", RUN)
    with pytest.raises(ValueError, match="got one with another batch_size, seed: use"):
        StateStore(tmp_path / "s", {"data": "x", "seed": 1, "batch_size": 4})


def test_starting_afresh_forgets_the_other_run(tmp_path):
    plan = plan_of(tmp_path, words(1))
    with StateStore(tmp_path / "s", RUN) as store:
        store.save(start_of(plan))
    other = RUN | {"seed": 1}
    with StateStore(tmp_path / "s", other, fresh=True) as store:
        assert store.load(start_of(plan, other)) is None


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "mine.txt").write_text("x")
    for fresh in (False, True):
        with pytest.raises(ValueError, match="got one with states: name another"):
            StateStore(tmp_path, RUN, fresh=fresh)
    assert (tmp_path / "states" / "mine.txt").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="Expected a folder for the running state"):
        StateStore(tmp_path / "file", RUN)


def test_a_removed_store_leaves_nothing(tmp_path):
    with StateStore(tmp_path / "s", RUN) as store:
        pass
    store.remove()
    assert not (tmp_path / "s").exists()


# Scales.


def _state(k_amax, v_amax) -> AmaxState:
    k_amax, v_amax = np.float32(k_amax), np.float32(v_amax)
    empty = init_state(
        num_layers=len(k_amax),
        num_kv_heads=k_amax.shape[1],
        num_classes=1,
        fingerprint=bytes(32),
    )
    return dataclasses.replace(empty, k_amax=k_amax, v_amax=v_amax)


def test_scales_are_amax_times_one_float32_constant():
    state = _state([[1.3, 7.7]], [[0.1, 0.3]])
    scales = make_scales(state, granularity="head", headroom=1.7)
    constant = np.float32(1.7 / 448)
    assert np.array_equal(scales.k_scale, np.float32([[1.3, 7.7]]) * constant)
    assert np.array_equal(scales.v_inv_scale, np.float32(1) / scales.v_scale)
    assert np.array_equal(scales.k_amax, state.k_amax)
    scales.check(num_layers=1, num_kv_heads=2)


def test_a_tensor_scale_takes_the_largest_head():
    scales = make_scales(_state([[1, 4]], [[3, 2]]), granularity="tensor", headroom=2)
    assert scales.k_amax.tolist() == [[4]]
    assert scales.v_amax.tolist() == [[3]]


def test_offline_and_online_make_the_same_scales_of_the_same_amax():
    from fp8kv_jax.cache import CacheConfig
    from fp8kv_jax.calibration import CalibrationConfig, freeze, init_calibration

    amax = np.float32(np.random.default_rng(0).lognormal(0, 3, (2, 1)))
    cache = CacheConfig(num_layers=2, num_kv_heads=1, head_dim=16, num_pages=1)
    config = CalibrationConfig(headroom=1.9)
    online = init_calibration(config, cache, max_tokens_per_step=1)
    online = freeze(
        dataclasses.replace(online, k_amax=jnp.asarray(amax), v_amax=jnp.asarray(amax))
    )
    scales = make_scales(_state(amax, amax), granularity="tensor", headroom=1.9)
    assert np.array_equal(scales.k_scale, online.k_scale)
    assert np.array_equal(scales.v_inv_scale, online.v_inv_scale)


def test_scales_are_clamped_and_zeros_get_the_provisional_one():
    state = _state([[1e-35, 0.0]], [[3e38, 1.0]])
    scales = make_scales(state, granularity="head", headroom=2)
    assert scales.k_scale.tolist() == [[SCALE_MIN, 2.0]]
    assert scales.v_scale[0, 0] <= SCALE_MAX
    assert scales.k_amax[0, 1] == 0


def test_skipped_layers_get_no_scales():
    state = _state([[1], [2], [3]], [[1], [2], [3]])
    scales = make_scales(state, granularity="tensor", headroom=2, skipped_layers=(1,))
    assert scales.layers == (0, 2)
    assert scales.k_amax.tolist() == [[1], [3]]
    with pytest.raises(ScaleError, match="got all of them skipped"):
        make_scales(state, granularity="tensor", headroom=2, skipped_layers=(0, 1, 2))


# Processes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1:80", 1, 0), "at least 2 processes"),
        (("10.0.0.1:80", 2, None), "at least 2 processes"),
        ((None, 2, 0), "at least 2 processes"),
        (("nowhere", 2, 0), "Expected a coordinator such as"),
        (("10.0.0.1:80", 2, 2), "Expected a process id from 0 to 1, got 2"),
    ],
)
def test_processes_that_are_not_described_do_not_join(arguments, message):
    with pytest.raises(ValueError, match=message):
        join(*arguments)


def test_a_process_on_its_own_starts_where_it_says():
    join(None, 1, None)
    assert tell_start(7) == 7
    with pytest.raises(ValueError, match="Expected process 0 to go on"):
        tell_start(None)


def test_processes_that_run_something_else_are_told_apart(monkeypatch):
    prints = [fingerprint(RUN), fingerprint(RUN), fingerprint(RUN | {"seed": 1})]

    def gather(mine):
        return np.stack([np.frombuffer(x, np.uint8) for x in prints])

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with pytest.raises(ValueError, match="but process 2 differs from process 0"):
        check_same(prints[0])
    prints[2] = prints[0]
    check_same(prints[0])
