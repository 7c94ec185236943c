"""Sharding of weights: what is split how; that it computes is tests/fp8kv_jax's."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from benchmarks.llama_step import llama_config
from fp8kv_jax.parallel import AXES, Placement
from models.sharding import param_shardings
from models.transformer import abstract_model

CONFIG = llama_config(num_layers=2, num_kv_heads=2, vocab_size=1001)


def shardings(config=CONFIG, sizes=(1, 2, 4), **options):
    _, params = abstract_model(config, jnp.bfloat16, **options)
    return params, param_shardings(config, params, Placement(AbstractMesh(sizes, AXES)))


def test_each_device_holds_its_share_of_the_layers():
    params, placed = shardings()
    layer, where = params["layers"][1], placed["layers"][1]

    def share(x, sharding):
        return x.size // jnp.prod(jnp.array(sharding.shard_shape(x.shape))).item()

    shares = jax.tree.map(share, layer, where)
    assert {name: x["kernel"] for name, x in shares["attention"].items()} == {
        "q": 8,
        "k": 2,  # 2 KV heads, each held by 4 devices
        "v": 2,
        "out": 8,
    }
    assert {name: x["kernel"] for name, x in shares["mlp"].items()} == {
        "gate": 8,
        "up": 8,
        "down": 8,
    }
    assert shares["attention_norm"]["scale"] == 1


def test_an_odd_vocabulary_lies_whole_on_every_device():
    _, placed = shardings()
    assert placed["embedding"].spec == PartitionSpec()
    _, placed = shardings(llama_config(num_layers=1, num_kv_heads=2))
    assert placed["embedding"].spec == PartitionSpec(("kv_heads", "queries"))


def test_fused_projections_are_refused():
    with pytest.raises(ValueError, match="parameters that are not fused"):
        shardings(fused=True)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_q_heads=32 to be a multiple of the 6"):
        shardings(sizes=(1, 2, 3))
    odd = llama_config(num_layers=1, num_kv_heads=2, intermediate_size=1004)
    with pytest.raises(ValueError, match="intermediate_size=1004 to be a multiple"):
        shardings(odd)
