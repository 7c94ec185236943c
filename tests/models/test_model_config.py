"""A configuration that cannot be a model is refused when it is built."""

import dataclasses

import pytest

from models.config import ModelConfig
from models.rope import Rope

GOOD = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=8,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=16,
    vocab_size=10,
    max_context=32,
    ropes=(Rope(base=1e4),) * 2,
    sliding_windows=(None, 3),
    softmax_scale=0.5,
    rms_norm_eps=1e-6,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "Expected vocab_size to be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_q_heads=4 to be a multiple of num_kv_heads=3"),
        ({"head_dim": 5}, "Expected an even head_dim, got 5"),
        ({"ropes": (Rope(base=1e4),)}, "ropes to have 2 entries, one per layer, got 1"),
        ({"sliding_windows": (None, 0)}, "sliding window to be at least 1, got 0"),
    ],
)
def test_an_impossible_configuration_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GOOD, **changes)


def test_configurations_are_values():
    assert hash(GOOD) == hash(dataclasses.replace(GOOD))
    assert dataclasses.replace(GOOD) == GOOD
