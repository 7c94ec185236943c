"""Argument shapes of page copies and gathers, from real models and at their edges."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.fp8 import FP8_DTYPE
from pallas_kernels.pages.layout import KPages, VPages, from_bits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagesCase:
    """A pair of pools, a list of copies, and a block table."""

    name: str
    num_pages: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype
    num_copies: int
    num_seqs: int
    pages_per_seq: int


class PagesInputs(NamedTuple):
    """The arrays of a case."""

    k_pages: KPages
    v_pages: VPages
    sources: Int[Array, "num_copies"]
    destinations: Int[Array, "num_copies"]
    block_table: Int[Array, "num_seqs pages_per_seq"]


DTYPES = (jnp.dtype(FP8_DTYPE), jnp.dtype(jnp.bfloat16))


def _model(name: str, num_kv_heads: int, head_dim: int) -> list[PagesCase]:
    return [
        PagesCase(
            name=f"{name}_page{page_size}_{dtype.name}",
            num_pages=64,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            num_copies=16,
            num_seqs=4,
            pages_per_seq=12,
        )
        for page_size in (64, 128)
        for dtype in DTYPES
    ]


CASES: list[PagesCase] = [
    *_model("llama3.1_8b", 8, 128),
    *_model("smollm2_135m", 3, 64),
    *_model("qwen2.5_0.5b", 2, 64),
    *_model("gemma3_270m", 1, 256),
    PagesCase(
        name="one_page_one_copy",
        num_pages=2,
        num_kv_heads=1,
        head_dim=128,
        page_size=128,
        dtype=DTYPES[0],
        num_copies=1,
        num_seqs=1,
        pages_per_seq=1,
    ),
]

# Few and small enough for the interpreter, each branch of the kernels once.
SMALL_CASES: list[PagesCase] = [
    PagesCase(
        name=f"small_dim{head_dim}_page{page_size}_{dtype.name}",
        num_pages=5,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        num_copies=2,
        num_seqs=1,
        pages_per_seq=2,
    )
    for num_kv_heads, head_dim, page_size, dtype in (
        (2, 64, 64, DTYPES[0]),
        (1, 128, 128, DTYPES[0]),
        (1, 256, 64, DTYPES[0]),
        (2, 64, 64, DTYPES[1]),
        (1, 128, 128, DTYPES[1]),
        (1, 256, 64, DTYPES[1]),
    )
]


def make_inputs(case: PagesCase, seed: int) -> PagesInputs:
    """Makes the arrays of a case: pools of any bits, NaN too.

    Half of the copies have a negative source or destination, as the padding of a
    list has; the last entry of each sequence in the block table is out of range.

    Args:
      case: the shapes.
      seed: of all that is random.
    """
    # Cases that differ in their copies or sequences alone share one compilation.
    shapes = dataclasses.replace(
        case, name="", num_copies=0, num_seqs=0, pages_per_seq=0
    )
    k_pages, v_pages = _random_pools(shapes, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    pages = rng.permutation(case.num_pages).astype(np.int32)
    half = case.num_pages // 2
    sources = rng.choice(pages[:half], case.num_copies)
    destinations = pages[half : half + case.num_copies]
    sources[3::4], destinations[1::4] = -1, -1
    table = rng.integers(0, case.num_pages, (case.num_seqs, case.pages_per_seq))
    table[:, -1] = np.resize([-1, case.num_pages, 2**31 - 1], case.num_seqs)
    return PagesInputs(
        k_pages=k_pages,
        v_pages=v_pages,
        sources=jnp.asarray(sources, jnp.int32),
        destinations=jnp.asarray(destinations, jnp.int32),
        block_table=jnp.asarray(table, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _random_pools(case: PagesCase, key: jax.Array) -> tuple[KPages, VPages]:
    heads, size, dim = case.num_kv_heads, case.page_size, case.head_dim
    shape = (2, case.num_pages * heads * size * dim)
    words = jax.random.bits(key, shape, jnp.uint32)
    # Truncated to the width of the dtype: any bits at all.
    k, v = words.astype(jnp.dtype(f"uint{8 * case.dtype.itemsize}"))
    return (
        from_bits(k.reshape(case.num_pages, heads, size, dim), case.dtype),
        from_bits(v.reshape(case.num_pages, heads, dim, size), case.dtype),
    )
