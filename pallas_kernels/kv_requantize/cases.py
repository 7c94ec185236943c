"""Argument shapes of requantization, from real models and at its edges."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.pages.layout import KPages, Rows, VPages, from_bits

type Ownership = Literal["prefill", "ragged", "decode", "mixed", "copied", "nothing"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequantizeCase:
    """A pair of FP8 pools, a staged window, and who owns which slot.

    `prefill`: a few sequences from page starts on, their rows in order, the last page
    of each ragged. `ragged`: the same from inside a page on. `decode`: rows in turn
    over all sequences, so a page's rows are apart. `mixed`: pages in order, out of
    order, ragged, and starting in the middle.
    `copied`: every owned page twice. `nothing`: no slot owns a row.
    """

    name: str
    num_pages: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_rows: int
    ownership: Ownership
    per_head: bool = False


class RequantizeInputs(NamedTuple):
    """The arrays of a case."""

    k_pages: KPages
    v_pages: VPages
    staged_k: Rows
    staged_v: Rows
    slot_owner: Int[Array, "num_slots"]
    page_mask: Bool[Array, "num_pages"]
    k_scale: Float[Array, "..."]
    v_scale: Float[Array, "..."]
    k_inv_scale: Float[Array, "..."]
    v_inv_scale: Float[Array, "..."]


def _model(name: str, num_kv_heads: int, head_dim: int) -> list[RequantizeCase]:
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return [
        RequantizeCase(
            name=f"{name}_page{page_size}_{ownership}",
            num_pages=96 * 128 // page_size,
            page_size=page_size,
            num_rows=num_rows,
            ownership=ownership,
            per_head=page_size == 64,
            **shape,
        )
        for page_size in (64, 128)
        for ownership, num_rows in (("prefill", 4607), ("mixed", 767))
    ]


CASES: list[RequantizeCase] = [
    *_model("llama3.1_8b", 8, 128),
    *_model("smollm2_135m", 3, 64),
    *_model("qwen2.5_0.5b", 2, 64),
    *_model("gemma3_270m", 1, 256),
    *(
        RequantizeCase(
            name=f"llama3.1_8b_ragged_{num_rows}",
            num_pages=96,
            num_kv_heads=8,
            head_dim=128,
            page_size=128,
            num_rows=num_rows,
            ownership="ragged",
            per_head=True,
        )
        for num_rows in (256, 4096)
    ),
    RequantizeCase(
        name="llama3.1_8b_decode",
        num_pages=64,
        num_kv_heads=8,
        head_dim=128,
        page_size=128,
        num_rows=256,
        ownership="decode",
    ),
    RequantizeCase(
        name="llama3.1_8b_copied",
        num_pages=64,
        num_kv_heads=8,
        head_dim=128,
        page_size=128,
        num_rows=1000,
        ownership="copied",
        per_head=True,
    ),
    RequantizeCase(
        name="llama3.1_8b_nothing",
        num_pages=64,
        num_kv_heads=8,
        head_dim=128,
        page_size=128,
        num_rows=256,
        ownership="nothing",
    ),
    RequantizeCase(
        name="gemma3_270m_fewer_rows_than_a_page",
        num_pages=8,
        num_kv_heads=1,
        head_dim=256,
        page_size=64,
        num_rows=13,
        ownership="prefill",
    ),
    RequantizeCase(
        name="smollm2_135m_one_row",
        num_pages=4,
        num_kv_heads=3,
        head_dim=64,
        page_size=128,
        num_rows=1,
        ownership="decode",
    ),
]

# Few and small enough for the interpreter, each branch of the kernels once.
SMALL_CASES: list[RequantizeCase] = [
    RequantizeCase(
        name=f"small_dim{head_dim}_page{page_size}_{ownership}",
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_rows=num_rows,
        ownership=ownership,
        per_head=num_kv_heads > 1,
    )
    for num_kv_heads, head_dim, page_size, num_pages, num_rows, ownership in (
        (2, 64, 64, 2, 100, "prefill"),
        (1, 64, 64, 2, 13, "decode"),
        (1, 64, 64, 3, 70, "ragged"),
        (1, 128, 128, 2, 150, "prefill"),
        (1, 256, 64, 2, 65, "copied"),
        (1, 64, 128, 2, 128, "nothing"),
    )
]


def make_inputs(case: RequantizeCase, seed: int) -> RequantizeInputs:
    """Makes the arrays of a case: pools of any code, NaN too, and planted NaN and Inf.

    Args:
      case: the shapes, and who owns what.
      seed: of all that is random.
    """
    rng = np.random.default_rng(seed)
    # Cases that differ in ownership alone share one compilation.
    shapes = dataclasses.replace(case, name="", ownership="nothing")
    return _random_arrays(shapes, jax.random.key(seed))._replace(
        slot_owner=jnp.asarray(_owners(case, rng)),
        page_mask=jnp.asarray(rng.random(case.num_pages) < 0.5),
    )


@functools.partial(jax.jit, static_argnums=0)
def _random_arrays(case: RequantizeCase, key: jax.Array) -> RequantizeInputs:
    heads, size, dim = case.num_kv_heads, case.page_size, case.head_dim
    pool_size = case.num_pages * heads * size * dim
    num_values = case.num_rows * heads * dim
    # One draw for all arrays: a draw for each would be seconds of compile time.
    num_words = 2 * pool_size + 2 * num_values + 4 * heads
    words = jax.random.bits(key, (num_words,), jnp.uint32)
    pools, values, scales = jnp.split(
        words, [2 * pool_size, 2 * pool_size + 2 * num_values]
    )
    k_pool, v_pool = pools.astype(jnp.uint8).reshape(2, -1)
    k_shape = (case.num_pages, heads, size, dim)
    v_shape = (case.num_pages, heads, dim, size)

    def rows(words: jax.Array) -> jax.Array:
        # A cube makes small values too: they fall to subnormals, and beyond 448.
        x = 1000 * (2 * _unit(words) - 1) ** 3
        x = x.reshape(case.num_rows, heads, dim)
        x = x.at[0, 0, 3].set(jnp.nan).at[-1, -1, 5].set(jnp.inf)
        return x.at[0, -1, 7].set(-jnp.inf).astype(jnp.bfloat16)

    def scale(words: jax.Array, low: float, high: float) -> jax.Array:
        scales = low + (high - low) * _unit(words)
        return scales if case.per_head else scales[0]

    staged_k, staged_v = map(rows, values.reshape(2, -1))
    scales = scales.reshape(4, heads)
    return RequantizeInputs(
        k_pages=from_bits(k_pool.reshape(k_shape), jnp.dtype(FP8_DTYPE)),
        v_pages=from_bits(v_pool.reshape(v_shape), jnp.dtype(FP8_DTYPE)),
        staged_k=staged_k,
        staged_v=staged_v,
        slot_owner=jnp.zeros(0, jnp.int32),  # made on the host
        page_mask=jnp.zeros(0, jnp.bool),
        k_scale=scale(scales[0], 0.1, 8.0),
        v_scale=scale(scales[1], 0.1, 8.0),
        k_inv_scale=scale(scales[2], 0.1, 2.0),
        v_inv_scale=scale(scales[3], 0.1, 2.0),
    )


def _unit(words: jax.Array) -> jax.Array:
    return (words >> 8).astype(jnp.float32) * 2.0**-24


def _owners(case: RequantizeCase, rng: np.random.Generator) -> np.ndarray:
    owners = np.full((case.num_pages, case.page_size), -1, np.int32)
    pages = rng.permutation(case.num_pages)
    match case.ownership:
        case "prefill":
            _own_runs(owners, pages, case.num_rows, rng, first_offset=False)
        case "ragged":
            _own_runs(owners, pages, case.num_rows, rng, first_offset=True)
        case "copied":
            half = case.num_pages // 2
            _own_runs(owners, pages[:half], case.num_rows, rng, first_offset=False)
            owners[pages[half : 2 * half]] = owners[pages[:half]]
        case "decode":
            # One sequence a page; row i is the (i // pages)th token of its sequence.
            for row in range(min(case.num_rows, owners.size)):
                turn, page = divmod(row, case.num_pages)
                owners[pages[page], turn] = row
        case "mixed":
            half = case.num_pages // 2
            _own_runs(owners, pages[:half], case.num_rows, rng, first_offset=True)
            shuffled = rng.integers(-1, case.num_rows, (half // 2, case.page_size))
            owners[pages[half : half + half // 2]] = shuffled
        case "nothing":
            pass
    return owners.reshape(-1)


def _own_runs(
    owners: np.ndarray,
    pages: np.ndarray,
    num_rows: int,
    rng: np.random.Generator,
    *,
    first_offset: bool,
) -> None:
    """Lays rows out as sequences of 1 to 400 tokens over pages of their own."""
    page_size = owners.shape[1]
    row, free = 0, list(pages)
    while row < num_rows and free:
        offset = int(rng.integers(page_size)) if first_offset else 0
        length = min(int(rng.integers(1, 400)), num_rows - row)
        while length and free:
            count = min(page_size - offset, length)
            owners[free.pop(), offset : offset + count] = np.arange(row, row + count)
            row, length, offset = row + count, length - count, 0
