"""A model's identity: what changes it, and what does not."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from artifact_examples import identity

from fp8kv_jax.cli.identity import identify
from fp8kv_jax.scales.identity import (
    fingerprint_weights,
    hash_config,
    hash_text,
    identify_model,
)
from fp8kv_jax.scales.scale_set import ScaleError
from models.loading import load_model

TINY = Path(__file__).parents[2] / "models" / "data" / "tiny_llama"


def params(dtype=np.float32):
    values = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    return {
        "layers": {"0": {"kernel": values.astype(dtype)}},
        "embedding": (values[:2] * 3).astype(dtype),
        "scale": np.float32(1.5),
        "table": np.arange(5, dtype=np.int8),
    }


def test_the_compute_type_and_the_place_of_the_weights_do_not_count():
    want = fingerprint_weights(params())
    assert len(want) == 64
    assert fingerprint_weights(params(jnp.bfloat16)) == want
    assert fingerprint_weights(jax.tree.map(jnp.asarray, params())) == want
    assert fingerprint_weights(dict(reversed(params().items()))) == want


def test_the_fingerprint_sees_names_shapes_values_and_their_order():
    def changed(change):
        tree = params()
        change(tree)
        return fingerprint_weights(tree)

    def rename(tree):
        tree["embeddings"] = tree.pop("embedding")

    def reshape(tree):
        tree["embedding"] = tree["embedding"].reshape(4, 3)

    def permute(tree):
        tree["embedding"] = tree["embedding"][::-1]

    def swap(tree):
        tree["embedding"], tree["scale"] = tree["scale"], tree["embedding"]

    def retype(tree):
        tree["table"] = tree["table"].view(np.uint8)

    def nudge(tree):  # by one bfloat16 step
        tree["scale"] = np.float32(1.5 + 2**-7)

    changes = [rename, reshape, permute, swap, retype, nudge]
    prints = {fingerprint_weights(params()), *map(changed, changes)}
    assert len(prints) == len(changes) + 1


def test_a_change_below_half_a_bfloat16_step_goes_unseen_as_documented():
    near = params() | {"scale": np.float32(1.5 + 2**-9)}
    assert fingerprint_weights(near) == fingerprint_weights(params())


def test_no_weights_are_an_error():
    with pytest.raises(ValueError, match="Expected params to hold tensors, got none"):
        fingerprint_weights({"layers": {}})


def test_eight_devices_give_the_fingerprint_of_one():
    code = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from fp8kv_jax.scales.identity import fingerprint_weights
assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("x",))
values = np.arange(64, dtype=np.float32).reshape(8, 8)
for spec in (P("x"), P(None, "x"), P()):
    print(fingerprint_weights({"w": jax.device_put(values, NamedSharding(mesh, spec))}))
"""
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert done.stdout.split() == [fingerprint_weights({"w": values})] * 3


@dataclasses.dataclass(frozen=True)
class Linear:
    factor: float


@dataclasses.dataclass(frozen=True)
class Other:
    factor: float


@dataclasses.dataclass(frozen=True)
class Config:
    architecture: str = "llama"
    num_layers: int = 2
    num_kv_heads: int = 1
    head_dim: int = 4
    scaling: Linear | Other | None = None
    eos_ids: tuple[int, ...] = ()


def test_the_config_hash_sees_values_and_the_types_of_nested_ones():
    configs = [Config(), Config(num_layers=3), Config(eos_ids=(1,))]
    configs += [Config(scaling=kind(x)) for kind in (Linear, Other) for x in (2.0, 3.0)]
    assert len(set(map(hash_config, configs))) == len(configs)


def test_a_new_field_at_its_default_keeps_old_hashes():
    newer = dataclasses.make_dataclass(
        "Config", [("new", int, 0)], bases=(Config,), frozen=True
    )
    assert hash_config(newer(num_layers=3)) == hash_config(Config(num_layers=3))
    assert hash_config(newer(new=1)) != hash_config(Config())


def test_what_the_tokenizer_says_is_not_part_of_the_config():
    ids = [
        identify_model(config, params(), tokenizer="{}", chat_template=None)
        for config in (Config(), Config(eos_ids=(5,)))
    ]
    assert ids[0] == ids[1]
    assert ids[0].tokenizer_sha256 == hash_text("{}")
    assert ids[0].chat_template_sha256 is None


def test_differences_name_the_parts():
    other = identity(
        weights_sha256="e" * 64, chat_template_sha256="f" * 64, head_dim=16
    )
    assert identity().differences(other) == {
        "head_dim": ("8", "16"),
        "weights": ("a" * 12, "e" * 12),
        "chat template": ("none", "f" * 12),
    }
    assert identity().differences(identity()) == {}


def test_an_identity_checks_its_fields():
    with pytest.raises(ScaleError, match=r"weights_sha256 to be 64 hexadecimal digits"):
        identity(weights_sha256="A" * 64)
    with pytest.raises(
        ScaleError, match=r"num_layers to be an integer from 1 on, got 0"
    ):
        identity(num_layers=0)


def test_a_loaded_model_has_one_identity_in_both_compute_types():
    wide, narrow = (identify(load_model(TINY, d)) for d in ("float32", "bfloat16"))
    assert wide == narrow
    assert wide.architecture == "llama"
    assert wide.chat_template_sha256 is not None
