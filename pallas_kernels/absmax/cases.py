"""Argument shapes of absmax, from real models and at its edges."""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from pallas_kernels.pages.layout import Rows

type Values = Literal["normal", "outlier", "zeros", "nonfinite"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AbsmaxCase:
    """A batch of rows. A third of the tokens is padding that holds huge values.

    `normal`: and a NaN and an Inf in one token. `outlier`: one channel of one head
    near 900. `zeros`: nothing else. `nonfinite`: nothing but NaN and Inf.
    """

    name: str
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    values: Values = "normal"


class AbsmaxInputs(NamedTuple):
    """The arrays of a case."""

    x: Rows
    real: Bool[Array, "num_tokens"]


_MODELS = {"llama-3.1-8b": (8, 128), "qwen2.5": (2, 64), "gemma-3": (1, 256)}

CASES: list[AbsmaxCase] = [
    *(
        AbsmaxCase(
            name=f"{model}_{num_tokens}",
            num_tokens=num_tokens,
            num_kv_heads=shape[0],
            head_dim=shape[1],
        )
        for model, shape in _MODELS.items()
        for num_tokens in (1, 3, 64, 1001)
    ),
    *(
        AbsmaxCase(
            name=f"smollm2_{values}",
            num_tokens=100,
            num_kv_heads=3,
            head_dim=64,
            values=values,
        )
        for values in ("outlier", "zeros", "nonfinite")
    ),
]

BENCHMARK_CASES: list[AbsmaxCase] = [
    AbsmaxCase(
        name=f"llama-3.1-8b_{num_tokens}",
        num_tokens=num_tokens,
        num_kv_heads=8,
        head_dim=128,
    )
    for num_tokens in (64, 2048, 65_536)
]


def make_inputs(case: AbsmaxCase, seed: int) -> AbsmaxInputs:
    """Builds the arrays of a case."""
    rng = np.random.default_rng(seed)
    shape = (case.num_tokens, case.num_kv_heads, case.head_dim)
    x = rng.standard_normal(shape, np.float32)
    last = case.num_tokens - 1
    match case.values:
        case "normal":
            x[last, 0, :2] = np.nan, -np.inf
        case "outlier":
            x[:, -1, 7] = rng.uniform(-900, -300, case.num_tokens)
        case "zeros":
            x[:] = 0
        case "nonfinite":
            x[:] = np.nan
            x[::2] = np.inf
    real = np.arange(case.num_tokens) % 3 != 1
    x[~real] = 1e30
    return AbsmaxInputs(jnp.asarray(x, jnp.bfloat16), jnp.asarray(real))
