"""Which settings are measured, and that what is measured is the scales' own loss."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from sweep_examples import write_random

from fp8kv_jax.drift.sweep import run_sweep
from fp8kv_jax.drift.sweep_grid import Grid
from fp8kv_jax.drift.sweep_quality import (
    EvaluationText,
    choose,
    measure,
    pick_texts,
    scales_key,
)
from fp8kv_jax.drift.sweep_record import record_rows
from fp8kv_jax.drift.trace import TraceShape, open_trace
from fp8kv_jax.scales.scale_set import ScaleSet
from models.full_attention import full_attention
from models.loading import load_model

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"
SHAPE = TraceShape(num_layers=2, num_kv_heads=2, head_dim=8)


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY, "float32")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Two orders, each window of which has scales of its own."""
    path = tmp_path_factory.mktemp("trace") / "t"
    write_random(path, {"a": 40, "b": 40}, spread=0)
    trace = open_trace(path)
    grid = Grid(
        orders=(("a",), ("b",)),
        windows=(1, 2, 4, 8, 16, 32, 1024),
        chunks=(1,),
        number_formats=("fp8_e4m3", "int8"),
    )
    outcomes = run_sweep(trace, grid)
    return [
        dataclasses.replace(o, scales=o.scales * np.float32(i + 1))
        for i, o in enumerate(outcomes)
    ]


def described(outcomes, indices):
    settings = [outcomes[i].setting for i in indices]
    return [(s.order[0], s.window) for s in settings]


def test_extreme_windows_of_each_line_come_first(outcomes):
    assert described(outcomes, choose(outcomes, 2)) == [("a", 1), ("b", 1)]
    extremes = [("a", 1), ("a", 32), ("b", 1), ("b", 32)]
    assert described(outcomes, choose(outcomes, 4)) == extremes


def test_then_come_windows_between_up_to_eight_sets(outcomes):
    chosen = described(outcomes, choose(outcomes))
    assert len(chosen) == 8
    # 4 lies widest from 1 and 32; then 2, 8 and 16 are as wide, and the first is taken.
    assert [window for name, window in chosen if name == "a"] == [1, 2, 4, 32]


def test_equal_scales_are_measured_once_and_only_what_a_cache_holds(outcomes):
    same = [dataclasses.replace(o, scales=outcomes[0].scales) for o in outcomes]
    assert choose(same) == [0]
    never = [dataclasses.replace(o, frozen_at=None) for o in outcomes]
    assert choose(never) == []
    formats = {outcomes[i].setting.number_format for i in choose(outcomes)}
    assert formats == {"fp8_e4m3"}
    other = dataclasses.replace(outcomes[7], scales=outcomes[0].scales)
    assert scales_key(other) == scales_key(outcomes[0])


def test_texts_are_taken_equally_from_each_class(tmp_path):
    write_random(tmp_path / "t", {"a/0": 5, "a/1": 20, "b": 9, "c": 50})
    trace = open_trace(tmp_path / "t")
    picked = pick_texts(trace, ("a", "b"), 20)
    assert [(t.data_class, len(t.token_ids)) for t in picked] == [
        ("a", 5),
        ("a", 6),
        ("b", 9),
    ]


def scales(value, granularity="tensor"):
    groups = 1 if granularity == "tensor" else 2
    one = np.full(groups, value, np.float32)
    return ScaleSet.from_scales({0: (one, one), 1: (one, one)}, granularity=granularity)


def test_worse_scales_cost_more_and_texts_do_not_disturb_each_other(tiny):
    rng = np.random.default_rng(0)
    texts = [
        EvaluationText(
            data_class=name, token_ids=rng.integers(3, 128, n).astype(np.int32)
        )
        for name, n in (("a", 40), ("b", 7))
    ]
    # The last two clip nearly all values, and round nearly all to zero.
    sets = [scales(0.05), scales(0.05, "head"), scales(2.0**-14), scales(2.0**12)]
    options = {"shape": SHAPE, "reference_dtype": "float32"}
    good, by_head, clips, coarse = measure(
        tiny.forward, tiny.params, texts, sets, **options
    )
    assert set(good) == {"a", "b", "all"}
    assert [good[name].num_tokens for name in ("a", "b", "all")] == [40, 7, 47]
    assert by_head == good
    assert 0 < good["all"].kl < 0.1 * min(clips["all"].kl, coarse["all"].kl)
    assert good["all"].top1 > clips["all"].top1
    mean = (40 * good["a"].kl + 7 * good["b"].kl) / 47
    assert good["all"].kl == pytest.approx(mean, rel=1e-5)
    (alone,) = measure(tiny.forward, tiny.params, texts[1:], sets[:1], **options)
    assert alone["b"].kl == pytest.approx(good["b"].kl, rel=1e-3)


def test_recorded_rows_do_not_depend_on_padding_or_other_texts(tiny):
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 128, n).astype(np.int32) for n in (48, 7)]
    recorded = list(record_rows(tiny.forward, tiny.params, full_attention, texts))
    assert [k.shape for k, _ in recorded] == [(2, 48, 2, 8), (2, 7, 2, 8)]
    ((k, v),) = record_rows(tiny.forward, tiny.params, full_attention, texts[1:])
    for alone, together in ((k, recorded[1][0]), (v, recorded[1][1])):
        assert alone.dtype == jnp.bfloat16
        difference = alone.astype(np.float32) - together.astype(np.float32)
        # One BF16 rounding apart at most: products of other shapes sum otherwise.
        assert (np.abs(difference) <= 2.0**-7 * np.abs(alone.astype("f4"))).all()
        assert np.abs(alone.astype(np.float32)).max() > 0
