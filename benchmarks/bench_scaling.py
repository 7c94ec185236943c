"""Append and attention of 32 layers against context length and batch size.

Up to 100 GB of pages: the points of a few tokens are bound by launches, the others by
the bytes of K and V. One set of pools serves all points. A step is its plan, once, and
32 times the layer in the median; each layer has pools of its own.
"""

import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import llama_step
from benchmarks.llama_step import PAGE_SIZE, StepShape
from benchmarks.rows import implementations, moved, spread
from benchmarks.timing import Times, device_times
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8 import quantize_rows
from pallas_kernels.kv_append import AppendPlan, kv_append, plan_append
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
TOLERANCE = 2.0**-8  # as for the attention op alone
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
    pools = llama_step.full_cache(
        StepShape(model=model, num_seqs=num_seqs, seq_len=context)
    )
    layers = list(zip(pools.k_pages, pools.v_pages, strict=True))
    del pools  # each layer's pools are donated to its calls
    benches = [_Point(*point, layers) for point in points]
    lowered = [lowered for bench in benches for lowered in bench.lower()]
    with ThreadPoolExecutor(max_workers=len(lowered)) as pool:
        compiled = list(pool.map(jax.stages.Lowered.compile, lowered))
    for bench, steps in zip(benches, itertools.batched(compiled, 2), strict=True):
        yield bench.row(*steps)


class _Point:
    """One batch of sequences of one length, over pages spread over all pools."""

    def __init__(
        self, num_seqs: int, context: int, layers: list[tuple[jax.Array, jax.Array]]
    ) -> None:
        self.num_seqs, self.context, self.layers = num_seqs, context, layers
        self.arrays = self._arrays(np.random.default_rng(0))
        # What the reference gathers, it widens: it is given the first sequences only.
        some = slice(max(1, CHECKED_TOKENS // context))
        names = "q", "block_table", "seq_lens"
        self.checked = {name: self.arrays[name][some] for name in names}

    def lower(self) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """Lowers the layer, and its reference, to compile them all at once."""
        first = implementations()[0]
        step = functools.partial(_append_and_attend, implementation=first)
        step = jax.jit(step, donate_argnums=(0, 1))
        reference = jax.jit(functools.partial(_attend, implementation="xla"))
        return (
            step.lower(*self.layers[0], self.arrays),
            reference.lower(*self.layers[0], self.checked),
        )

    def row(self, step: jax.stages.Compiled, reference: jax.stages.Compiled) -> Row:
        error = self._check(step, reference)

        def call(layer: int) -> jax.Array:
            out, *self.layers[layer] = step(*self.layers[layer], self.arrays)
            return out

        num_layers = len(self.layers)
        calls = [functools.partial(call, layer) for layer in range(num_layers)]
        layer = device_times(calls, repeats=max(20, num_layers))
        plan = device_times([functools.partial(self._plan, self.arrays["slots"])])
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

    def _plan(self, slots: jax.Array) -> AppendPlan:
        num_pages = self.layers[0][0].shape[0]
        return plan_append(slots, num_pages=num_pages, page_size=PAGE_SIZE)

    def _arrays(self, rng: np.random.Generator) -> dict[str, Any]:
        k_pages, _ = self.layers[0]
        num_pages, num_kv_heads, _, head_dim = k_pages.shape
        pages_per_seq = self.context // PAGE_SIZE
        pages = rng.permutation(num_pages)[: self.num_seqs * pages_per_seq]
        table = pages.reshape(self.num_seqs, pages_per_seq)
        slots = table[:, -1] * PAGE_SIZE + PAGE_SIZE - 1

        def normal(num_heads: int) -> jax.Array:
            shape = self.num_seqs, num_heads, head_dim
            return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

        slots = jnp.asarray(slots, jnp.int32)
        return {
            "q": normal(4 * num_kv_heads)[:, None],
            "k": normal(num_kv_heads),
            "v": normal(num_kv_heads),
            "slots": slots,
            "plan": self._plan(slots),
            "block_table": jnp.asarray(table, jnp.int32),
            "seq_lens": jnp.full(self.num_seqs, self.context, jnp.int32),
        }

    def _check(
        self, step: jax.stages.Compiled, reference: jax.stages.Compiled
    ) -> float:
        """Compares the bytes written, and the output of the first sequences."""
        arrays = self.arrays
        out, *self.layers[0] = step(*self.layers[0], arrays)
        heads = jnp.full(arrays["k"].shape[1], 1 / SCALE)
        for got, name in zip(
            read_slots(*self.layers[0], arrays["slots"]), "kv", strict=True
        ):
            want = quantize_rows(arrays[name], heads)
            if bool(jnp.any(as_bits(got) != as_bits(want))):
                raise AssertionError(f"{name} in the pool differs from the reference's")
        expected = reference(*self.layers[0], self.checked)
        got = np.asarray(out[: len(expected)], np.float32)
        want = np.asarray(expected, np.float32)
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if not error <= TOLERANCE:
            raise AssertionError(f"Expected an error within {TOLERANCE}, got {error}.")
        return error


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
