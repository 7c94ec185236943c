"""Argument shapes of kv_append, from real models and at its edges."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.pages.layout import PAD_SLOT, KPages, Rows, VPages

type Slots = Literal[
    "decode",
    "duplicates",
    "padding",
    "whole_pages",
    "mid_page",
    "ragged",
    "shared_page",
    "mixed",
    "past_pool",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AppendCase:
    """A pair of pools, a batch of rows, and where its tokens go.

    `decode`: distinct slots at random, one of them padding. `duplicates`: the same,
    a quarter of the tokens naming another one's slot. `padding`: nothing else.
    `whole_pages`: pages filled from end to end, in random order. `mid_page`: one
    sequence that begins and ends inside a page. `ragged`: several such, then
    padding. `shared_page`: runs of which two at a time write to one page. `mixed`:
    a chunk between the tokens of a decode step. `past_pool`: like mixed, every third
    slot past the pool.
    """

    name: str
    num_pages: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_tokens: int
    slots: Slots
    dtype: Any = FP8_DTYPE
    statistics: bool = False


class AppendInputs(NamedTuple):
    """The arrays of a case; the scales are None where the pools are not FP8."""

    k_pages: KPages
    v_pages: VPages
    k: Rows
    v: Rows
    slot_mapping: Int[Array, "num_tokens"]
    k_inv_scale: Float[Array, "num_kv_heads"] | None
    v_inv_scale: Float[Array, "num_kv_heads"] | None


_MODELS = {
    "llama-3.1-8b": {"num_kv_heads": 8, "head_dim": 128},
    "smollm2": {"num_kv_heads": 3, "head_dim": 64},
    "qwen2.5": {"num_kv_heads": 2, "head_dim": 64},
    "gemma-3": {"num_kv_heads": 1, "head_dim": 256},
}


def _case(
    model: str, slots: Slots, num_tokens: int, page_size: int = 128, **changes
) -> AppendCase:
    dtype = jnp.dtype(changes.get("dtype", FP8_DTYPE)).name
    return AppendCase(
        name=f"{model}_{slots}_{num_tokens}_page{page_size}_{dtype}",
        # Room for each token, and as much again that must stay as it is.
        num_pages=2 * num_tokens // page_size + 24,
        num_tokens=num_tokens,
        slots=slots,
        page_size=page_size,
        **_MODELS[model],
        **changes,
    )


_LLAMA = "llama-3.1-8b"

# Cases that differ in their slots alone share their compilations.
CASES: list[AppendCase] = [
    *(_case(model, "decode", 8, 64, statistics=True) for model in _MODELS),
    *(_case(model, "decode", 1, 64, statistics=True) for model in _MODELS),
    _case(_LLAMA, "decode", 3, statistics=True),
    *(_case(model, "decode", 64) for model in _MODELS),
    *(_case(model, "ragged", 600, 64) for model in _MODELS),
    *(_case(model, "ragged", 601, statistics=True) for model in _MODELS),
    _case(_LLAMA, "decode", 1),
    _case(_LLAMA, "decode", 256),
    _case(_LLAMA, "past_pool", 64),
    *(_case(_LLAMA, x, 8, 64, statistics=True) for x in ("duplicates", "padding")),
    *(
        _case(_LLAMA, slots, 601, statistics=True)
        for slots in ("padding", "whole_pages", "mid_page", "shared_page", "mixed")
    ),
    *(_case(_LLAMA, slots, 600, 64) for slots in ("duplicates", "past_pool", "mixed")),
    _case(_LLAMA, "decode", 8, dtype=jnp.bfloat16),
    _case(_LLAMA, "ragged", 600, dtype=jnp.bfloat16),
    _case("smollm2", "mixed", 600, 64, dtype=jnp.bfloat16),
    _case("gemma-3", "ragged", 600, dtype=jnp.bfloat16),
]

BENCHMARK_CASES: list[AppendCase] = [
    *(_case(_LLAMA, "decode", n) for n in (1, 8, 64, 256)),
    *(_case(_LLAMA, "decode", n, statistics=True) for n in (8, 256)),
    _case(_LLAMA, "ragged", 2048),
    _case(_LLAMA, "ragged", 2048, statistics=True),
    _case(_LLAMA, "whole_pages", 65_536),
    _case(_LLAMA, "ragged", 65_536),
    _case(_LLAMA, "ragged", 65_536, statistics=True),
]


def make_inputs(case: AppendCase, seed: int) -> AppendInputs:
    """Builds the arrays of a case.

    K holds values that saturate, underflow, are zero, NaN or Inf. V holds none of
    them but a NaN in one token, so that kernels meet rows in which nothing counts.
    The pools hold random codes, NaN among them.
    """
    rng = np.random.default_rng(seed)
    slots = jnp.asarray(_slot_mapping(case, rng))
    pool = (case.num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    k_pages = _random_codes(pool, case.dtype, rng)
    v_pages = _random_codes((*pool[:2], pool[3], pool[2]), case.dtype, rng)
    k, v = _rows((case.num_tokens, case.num_kv_heads, case.head_dim), rng)
    if case.dtype != FP8_DTYPE:
        return AppendInputs(k_pages, v_pages, k, v, slots, None, None)
    scales = rng.uniform(0.5, 3.0, (2, case.num_kv_heads)).astype(np.float32)
    return AppendInputs(k_pages, v_pages, k, v, slots, *jnp.asarray(scales))


def _random_codes(
    shape: tuple[int, ...], dtype: Any, rng: np.random.Generator
) -> jax.Array:
    raw = rng.bytes(math.prod(shape) * jnp.dtype(dtype).itemsize)
    return jnp.asarray(np.frombuffer(raw, jnp.dtype(dtype)).reshape(shape))


def _rows(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Rows, Rows]:
    middle = shape[0] // 2
    # Tokens of very different size: 2^-20 underflows, 2^9 saturates.
    exponent = rng.integers(-20, 10, (shape[0], 1, 1))
    k = np.ldexp(rng.standard_normal(shape, np.float32), exponent)
    k[middle, 0, :5] = [0.0, -0.0, np.nan, np.inf, -np.inf]
    v = 0.5 + 1.5 * rng.random(shape, np.float32)
    v *= np.where(rng.random(shape, np.float32) < 0.5, -1, 1)
    v[middle, -1, 7] = np.nan
    return jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16)


def _slot_mapping(case: AppendCase, rng: np.random.Generator) -> np.ndarray:
    num_slots = case.num_pages * case.page_size
    slots = np.full(case.num_tokens, PAD_SLOT, np.int32)
    match case.slots:
        case "padding":
            pass
        case "decode" | "duplicates":
            slots[:] = rng.permutation(num_slots)[: case.num_tokens]
            if case.slots == "duplicates":
                naming = rng.permutation(case.num_tokens)[: case.num_tokens // 4]
                slots[naming] = slots[rng.integers(0, case.num_tokens, naming.size)]
            if case.num_tokens > 3:
                slots[3] = PAD_SLOT
        case "whole_pages":
            slots[:] = _sequence(case, rng.permutation(case.num_pages), 0, slots.size)
        case "mid_page":
            slots[:] = _sequence(case, rng.permutation(case.num_pages), 37, slots.size)
        case "ragged":
            slots = _ragged(case, rng)
        case "shared_page":
            slots = _shared_pages(case, rng)
        case "mixed" | "past_pool":
            slots[:] = rng.permutation(num_slots // 2)[: case.num_tokens]
            start, stop = case.num_tokens // 3, case.num_tokens - 9
            upper = np.arange(case.num_pages // 2, case.num_pages)
            slots[start:stop] = _sequence(case, upper, 11, stop - start)
            if case.slots == "past_pool":
                slots[::3] += num_slots
    return slots


def _sequence(case: AppendCase, pages: np.ndarray, offset: int, length: int):
    """Slots of one sequence from `offset` of its first page on."""
    position = np.arange(offset, offset + length)
    return pages[position // case.page_size] * case.page_size + (
        position % case.page_size
    )


def _ragged(case: AppendCase, rng: np.random.Generator) -> np.ndarray:
    num_sequences = max(2, case.num_tokens // 1638)
    # 5 tokens of padding at the end
    lengths = rng.multinomial(
        case.num_tokens - 5, rng.dirichlet(np.full(num_sequences, 4.0))
    )
    pages, parts = rng.permutation(case.num_pages), []
    for length in lengths:
        offset = int(rng.integers(case.page_size))
        parts.append(_sequence(case, pages, offset, length))
        pages = pages[-(-(offset + length) // case.page_size) :]
    return np.concatenate([*parts, np.full(5, PAD_SLOT)]).astype(np.int32)


def _shared_pages(case: AppendCase, rng: np.random.Generator) -> np.ndarray:
    """Runs of a quarter page; each page gets two of them, from apart in the batch."""
    run = case.page_size // 4
    num_runs = case.num_tokens // run
    pages = rng.permutation(case.num_pages)[: -(-num_runs // 2)]
    starts = (np.concatenate([pages, pages]) * case.page_size)[:num_runs]
    starts[pages.size :] += 2 * run
    slots = (starts[:, None] + np.arange(run)).reshape(-1)
    return np.resize(slots, case.num_tokens).astype(np.int32)
