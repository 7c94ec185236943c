"""Append and attention of 32 layers against context length and batch size.

Up to 100 GB of pages: the points of a few tokens are bound by launches, the others by
the bytes of K and V. One set of pools serves all points. A step is its plan, once, and
32 times the layer in the median; each layer has pools of its own.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import llama_step, turn
from benchmarks.llama_step import PAGE_SIZE, StepShape
from benchmarks.rows import (
    check_error,
    implementations,
    moved,
    relative_error,
    spread,
)
from benchmarks.timing import Times, device_times
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8 import quantize_rows
from pallas_kernels.kv_append import kv_append, plan_append
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.pages.layout import as_bits, read_slots

POINTS = (
    (1, 1 << 10),
    (1, 1 << 13),
    (1, 1 << 16),
    (1, 1 << 19),
    (8, 1 << 10),
    (8, 1 << 13),
    (8, 1 << 16),
    (32, 1 << 12),
    (32, 1 << 15),
    (256, 1 << 10),
    (256, 1 << 12),
    (3, 1 << 19),  # 103 GB
)
SMALL_POINTS = ((1, 256), (2, 1024))
SCALE = 0.25
# Of cached tokens, at most, that the reference is given.
CHECKED_TOKENS = 1 << 19

type Row = dict[str, Any]


def run(small: bool) -> Iterator[Row]:
    """Checks each point against the reference, then times it.

    Args:
      small: two points of two small layers, for a machine without a GPU.

    Yields:
      One row per point.
    """
    points = SMALL_POINTS if small else POINTS
    model = llama_step.llama_config(num_layers=2 if small else 32)
    num_seqs, context = max(points, key=lambda point: point[0] * point[1])
    shape = StepShape(model=model, num_seqs=num_seqs, seq_len=context)
    pools = jax.eval_shape(lambda: llama_step.full_cache(shape))
    first = pools.k_pages[0], pools.v_pages[0]
    compiled = turn.compile_all([_lower(*point, first) for point in points])
    pools = llama_step.full_cache(shape)
    layers = list(zip(pools.k_pages, pools.v_pages, strict=True))
    del pools  # each layer's pools are donated to its calls
    for point, programs in zip(points, compiled, strict=True):
        yield _Point(*point, layers, programs).row()


class _Programs(NamedTuple):
    """What is run of one point; `reference` for its first sequences only."""

    plan: Any
    step: Any
    reference: Any


def _lower(num_seqs: int, context: int, pools: tuple[Any, Any]) -> _Programs:
    arrays = jax.eval_shape(lambda: _arrays(num_seqs, context, pools[0].shape))
    plan = functools.partial(
        plan_append, num_pages=pools[0].shape[0], page_size=PAGE_SIZE
    )
    planned = arrays | {"plan": jax.eval_shape(plan, arrays["slots"])}
    step = functools.partial(_append_and_attend, implementation=implementations()[0])
    reference = functools.partial(_attend, implementation="xla")
    checked = jax.eval_shape(
        functools.partial(_checked, num_seqs=num_seqs, context=context), arrays
    )
    return _Programs(
        plan=turn.lower(plan, arrays["slots"]),
        step=turn.lower(step, *pools, planned, donate=(0, 1)),
        reference=turn.lower(reference, *pools, checked),
    )


class _Point:
    """One batch of sequences of one length, over pages spread over all pools."""

    def __init__(
        self,
        num_seqs: int,
        context: int,
        layers: list[tuple[jax.Array, jax.Array]],
        programs: _Programs,
    ) -> None:
        self.num_seqs, self.context, self.layers = num_seqs, context, layers
        self.programs = programs
        self.arrays = _arrays(num_seqs, context, layers[0][0].shape)
        self.arrays["plan"] = programs.plan(self.arrays["slots"])

    def row(self) -> Row:
        error = self._check()

        def call(layer: int) -> jax.Array:
            pools = self.layers[layer]
            out, *self.layers[layer] = self.programs.step(*pools, self.arrays)
            return out

        num_layers = len(self.layers)
        calls = [functools.partial(call, layer) for layer in range(num_layers)]
        layer = device_times(calls, repeats=max(20, num_layers))
        plan = device_times([lambda: self.programs.plan(self.arrays["slots"])])
        sums = (p + num_layers * us for p, us in zip(plan[:3], layer[:3], strict=True))
        times = Times(*sums, layer.count)
        k_pages, _ = self.layers[0]
        # K and V of every cached token, all layers.
        sizes = num_layers, k_pages.shape[1], k_pages.shape[3], 2, k_pages.itemsize
        row = {
            "op": "append + attention",
            "case": f"{self.num_seqs}x{self.context}",
            "implementation": implementations()[0],
            "num_seqs": self.num_seqs,
            "context": self.context,
            "us_per_token": times.median / self.num_seqs,
            "relative_error": error,
        }
        product = (self.num_seqs, self.context, *sizes)
        return row | spread(times) | moved(product, times.median)

    def _check(self) -> float:
        """Compares the bytes written, and the output of the first sequences."""
        arrays = self.arrays
        out, *self.layers[0] = self.programs.step(*self.layers[0], arrays)
        heads = jnp.full(arrays["k"].shape[1], 1 / SCALE)
        for got, name in zip(
            read_slots(*self.layers[0], arrays["slots"]), "kv", strict=True
        ):
            want = quantize_rows(arrays[name], heads)
            if bool(jnp.any(as_bits(got) != as_bits(want))):
                raise AssertionError(f"{name} in the pool differs from the reference's")
        checked = _checked(arrays, self.num_seqs, self.context)
        expected = self.programs.reference(*self.layers[0], checked)
        error = relative_error(out[: len(expected)], expected)
        check_error(error)
        return error


def _arrays(num_seqs: int, context: int, pool_shape: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    num_pages, num_kv_heads, _, head_dim = pool_shape
    pages_per_seq = context // PAGE_SIZE
    pages = rng.permutation(num_pages)[: num_seqs * pages_per_seq]
    table = pages.reshape(num_seqs, pages_per_seq)
    slots = table[:, -1] * PAGE_SIZE + PAGE_SIZE - 1

    def normal(num_heads: int) -> jax.Array:
        shape = num_seqs, num_heads, head_dim
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    return {
        "q": normal(4 * num_kv_heads)[:, None],
        "k": normal(num_kv_heads),
        "v": normal(num_kv_heads),
        "slots": jnp.asarray(slots, jnp.int32),
        "block_table": jnp.asarray(table, jnp.int32),
        "seq_lens": jnp.full(num_seqs, context, jnp.int32),
    }


def _checked(arrays: dict[str, Any], num_seqs: int, context: int) -> dict[str, Any]:
    """Takes the first sequences: what the reference gathers, it widens."""
    some = min(num_seqs, max(1, CHECKED_TOKENS // context))
    names = "q", "block_table", "seq_lens"
    return {name: arrays[name][:some] for name in names}


def _append_and_attend(
    k_pages: jax.Array,
    v_pages: jax.Array,
    arrays: dict[str, Any],
    *,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    k_pages, v_pages, _ = kv_append(
        k_pages,
        v_pages,
        arrays["k"],
        arrays["v"],
        arrays["plan"],
        k_inv_scale=1 / SCALE,
        v_inv_scale=1 / SCALE,
        implementation=implementation,
    )
    out = _attend(k_pages, v_pages, arrays, implementation=implementation)
    return out, k_pages, v_pages


def _attend(
    k_pages: jax.Array,
    v_pages: jax.Array,
    arrays: dict[str, Any],
    *,
    implementation: Implementation,
) -> jax.Array:
    return paged_attention(
        arrays["q"],
        k_pages,
        v_pages,
        arrays["block_table"],
        arrays["seq_lens"],
        k_scale=SCALE,
        v_scale=SCALE,
        implementation=implementation,
    )
