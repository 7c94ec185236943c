"""Scale files of the kinds that other projects write."""

import json

import numpy as np
import safetensors.numpy

NUM_LAYERS, NUM_KV_HEADS = 3, 4
# As a folder of a checkpoint says it, for scales per tensor.
SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}


def value_of(layer, letter, head=0):
    """The scale of a group in these files: each is another one, exact in BF16."""
    return float(2.0**-6 * (1 + layer / 4 + ("kv".index(letter) + head / 4) / 16))


def scale_of(layer, letter, *, shape=(1,), dtype=np.float32):
    heads = range(int(np.prod(shape)))
    values = [value_of(layer, letter, head) for head in heads]
    return np.array(values, np.float32).astype(dtype).reshape(shape)


def tensors_of(
    pattern="model.layers.{layer}.self_attn.{letter}_scale",
    *,
    layers=range(NUM_LAYERS),
    letters="kv",
    **options,
):
    return {
        pattern.format(layer=layer, letter=letter): scale_of(layer, letter, **options)
        for layer in layers
        for letter in letters
    }


def save(path, tensors, metadata=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    return path


def save_json(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


def legacy(ranks, dtype="float8_e4m3fn", model_type="llama"):
    return {
        "model_type": model_type,
        "kv_cache": {"dtype": dtype, "scaling_factor": ranks},
    }


def check_values(scale_set, *, layers=range(NUM_LAYERS), letters="kv", factor=1.0):
    """Compares with `value_of`, group by group.

    Args:
      letters: whose values K and V should have: "kk" where one serves both.
    """
    assert scale_set.layers == tuple(layers)
    for row, layer in enumerate(layers):
        for head in range(scale_set.groups):
            for got, letter in zip(
                (scale_set.k_scale, scale_set.v_scale), letters, strict=True
            ):
                assert got[row, head] == factor * value_of(layer, letter, head)
