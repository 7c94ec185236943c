"""The warpgroups of the prefill kernel that compute, each for 64 queries of one head.

The two take turns at the tensor cores: while one computes its softmax, the products
of the other run. Within a warpgroup the second product of a step runs during the
softmax of the next one.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.layouts import PRODUCT, store
from pallas_kernels.paged_attention.prefill_config import (
    NUM_CONSUMERS,
    ROWS,
    PrefillConfig,
    query_slots,
)
from pallas_kernels.paged_attention.prefill_refs import (
    OPERAND,
    PrefillRefs,
    value_dtype,
)
from pallas_kernels.paged_attention.prefill_schedule import Item, Walk, queries_of
from pallas_kernels.paged_attention.problem import Problem

I32 = jnp.int32
LOG2E = math.log2(math.e)
# Weights relative to the largest one: up to 2^14, so that the smallest stay normal
# in float16.
_WEIGHT_EXPONENT = 14.0
# Below any logit, above -inf: `-inf - _FLOOR` is -inf, `-inf - -inf` would be NaN.
_FLOOR = -1e30


def consume(
    problem: Problem,
    config: PrefillConfig,
    refs: PrefillRefs,
    warpgroup: jax.Array,
    walk: Walk,
) -> None:
    """Computes the outputs of 64 queries of one head of each item."""
    p = problem
    attend = _attend_overlapped if config.weights_in_registers else _attend_in_turn

    def consume_item(count: jax.Array, item: Item, used: jax.Array) -> None:
        place = lax.rem(count, I32(query_slots(p)))
        barrier = place * NUM_CONSUMERS + warpgroup
        q_smem = refs.q_smem.at[place, warpgroup]
        at, position = queries_of(p, item, warpgroup)
        constant = jnp.float32(p.softmax_scale * LOG2E)
        if refs.k_scale is not None:
            constant = constant * _scale(refs.k_scale, item.kv_head)
        plgpu.barrier_wait(refs.q_full.at[barrier])
        steps = _Steps(
            p, config, refs, item, warpgroup, q_smem, position, constant, used
        )
        acc, largest, total = attend(steps)

        def write() -> None:
            out = finish(acc, total, refs.v_scale, item, position)
            if p.q_dtype == OPERAND:
                q_smem[...] = out.astype(OPERAND)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem, refs.out.at[at])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                store(refs.out.at[at], out.astype(p.q_dtype))

        def write_part() -> None:
            for ref, x in zip(refs.parts, (acc, largest, total), strict=True):
                store(ref.at[item.part, warpgroup], x)

        if refs.parts is None:
            write()
        else:
            pl.when(item.part < 0)(write)
            pl.when(item.part >= 0)(write_part)
        plgpu.barrier_arrive(refs.q_free.at[barrier])

    # Whose turn it is goes from item to item.
    if config.weights_in_registers:
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))
    walk(consume_item)
    if config.weights_in_registers:
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def finish(
    acc: jax.Array,
    total: jax.Array,
    v_scale_ref: Any | None,
    item: Item,
    position: jax.Array,
) -> jax.Array:
    """Turns weighted sums of values into outputs; zeros for padding queries."""
    factor = jnp.float32(1.0)
    if v_scale_ref is not None:
        factor = _scale(v_scale_ref, item.kv_head)
    acc = acc * lax.broadcast_in_dim(factor / total, acc.shape, [0])
    row = plgpu.broadcasted_iota(I32, acc.shape, 0, layout=PRODUCT) + position
    # Not a product with zero: padding may have computed NaN.
    return jnp.where((row >= 0) & (row < item.seq_len), acc, 0.0)


def _scale(scale_ref: Any, kv_head: jax.Array) -> jax.Array:
    return scale_ref[kv_head if scale_ref.shape[0] > 1 else 0]


class _Steps(NamedTuple):
    """The phases that both ways through the tiles are made of."""

    problem: Problem
    config: PrefillConfig
    refs: PrefillRefs
    item: Item
    warpgroup: jax.Array
    q_smem: Any  # [ROWS, head_dim]
    position: jax.Array  # of this warpgroup's first query
    constant: jax.Array  # product -> logit in base 2
    used: jax.Array  # tiles of earlier items: gives the place in the rings

    def slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(self.used + i, I32(self.config.num_stages))

    def start_logits(self, acc_ref: Any, i: jax.Array) -> None:
        refs, slot = self.refs, self.slot(i)
        k = refs.k_smem.at[slot].transpose((1, 0))
        plgpu.wgmma(acc_ref, self.q_smem, k)

    def start_output(self, acc_ref: Any, weights: Any, i: jax.Array) -> None:
        v = self.refs.v_smem.at[self.slot(i)].transpose((1, 0))
        plgpu.wgmma(acc_ref, weights, v)

    def softmax(
        self, x: jax.Array, i: jax.Array, largest: jax.Array, *, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Turns products into weights.

        Returns:
          The weights, the new largest logit, and what older weights are multiplied
          by to be relative to it.
        """
        p, factor, cap = self.problem, self.constant, self.problem.logit_soft_cap
        if cap is not None:
            # cap * tanh(y / cap) as cap - 2 cap / (exp(2 y / cap) + 1), in base 2.
            bent = jnp.exp2(x * (factor * (2 / cap))) + 1.0
            x = (cap * LOG2E) - (2 * cap * LOG2E) / bent
            factor = jnp.float32(1.0)
        if masked:
            # Sums that change with the step: else all of them are kept in registers.
            first = (self.item.low + i) * self.config.block_kv
            token = plgpu.broadcasted_iota(I32, x.shape, 1, layout=PRODUCT) + first
            position = plgpu.broadcasted_iota(I32, x.shape, 0, layout=PRODUCT)
            position = position + self.position
            seen = token <= position
            if p.sliding_window is not None:
                seen = seen & (token > position - p.sliding_window)
            x = jnp.where(seen, x, -jnp.inf)
        new_largest = jnp.maximum(largest, x.max(axis=1) * factor)
        rescale = jnp.exp2(largest - new_largest)
        base = new_largest
        if p.fp8:
            base = base - _WEIGHT_EXPONENT
        weights = jnp.exp2(x * factor - lax.broadcast_in_dim(base, x.shape, [0]))
        return weights, new_largest, rescale

    def start(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Output, largest logit and sum of weights of no tile."""
        per_row = PRODUCT.reduce(1)
        shape = (ROWS, self.problem.head_dim)
        acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), PRODUCT)
        largest = plgpu.layout_cast(jnp.full((ROWS,), _FLOOR, jnp.float32), per_row)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row)
        return acc, largest, total

    def run(self, step: Any, carry: Any, *, first: int) -> Any:
        """Runs `carry = step(i, carry, masked=)` on the tiles from `first` on.

        Tile 0 takes the mask in any case: a loop less for what has no window.
        """
        item = self.item
        sections = [
            (item.full_low, item.full_high, False),
            (item.full_high, item.num_tiles, True),
        ]
        if self.problem.sliding_window is not None or first == 0:
            sections.insert(0, (I32(first), item.full_low, True))
        for low, high, masked in sections:
            body = functools.partial(step, masked=masked)
            carry = lax.fori_loop(low, high, body, carry)
        return carry


def _attend_overlapped(steps: _Steps) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the second product of each step during the softmax of the next one."""
    refs, item, me = steps.refs, steps.item, steps.warpgroup
    acc_type = plgpu.ACC((ROWS, steps.problem.head_dim), jnp.float32)
    logits_type = plgpu.ACC((ROWS, steps.config.block_kv), jnp.float32)

    def wait_for_turn() -> None:
        plgpu.barrier_wait(refs.turn.at[me])

    def pass_turn() -> None:
        plgpu.barrier_arrive(refs.turn.at[NUM_CONSUMERS - 1 - me])

    def pin(weights: jax.Array, slot: jax.Array, seq_len: jax.Array) -> None:
        """Makes the compiler hold weights in registers here, by a store that never runs.

        If it did, it would do no harm: no query of such a sequence is real. The
        condition comes from memory within the loop, so that it stays there.
        """

        @pl.when(seq_len == jnp.iinfo(jnp.int32).min)
        def _():
            x = weights.astype(value_dtype(steps.problem))
            store(refs.v_smem.at[slot, pl.ds(0, ROWS)], x)

    def first_step(largest):
        slot = steps.slot(I32(0))

        def body(logits_ref):
            plgpu.barrier_wait(refs.k_full.at[slot])
            wait_for_turn()
            steps.start_logits(logits_ref, I32(0))
            pass_turn()
            return logits_ref[...]

        x = pl.run_scoped(body, logits_type)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        weights, largest, _ = steps.softmax(x, I32(0), largest, masked=True)
        return weights.astype(value_dtype(steps.problem)), largest, weights.sum(axis=1)

    def step(i, carry, *, masked):
        acc, weights, largest, total = carry
        slot, last_slot = steps.slot(i), steps.slot(i - 1)
        seq_len = refs.seq_lens[item.seq]

        def body(logits_ref, acc_ref):
            acc_ref[...] = acc
            plgpu.barrier_wait(refs.k_full.at[slot])
            wait_for_turn()
            steps.start_logits(logits_ref, i)
            plgpu.barrier_wait(refs.v_full.at[last_slot])
            steps.start_output(acc_ref, weights, i - 1)
            pass_turn()
            x = plgpu.wgmma_accumulator_load(logits_ref, wait_n=1)
            plgpu.barrier_arrive(refs.k_free.at[slot])
            new_weights, new_largest, rescale = steps.softmax(
                x, i, largest, masked=masked
            )
            new_total = total * rescale + new_weights.sum(axis=1)
            # The softmax belongs before the wait for the output, and the registers
            # that this product reads are taken until after it. ptxas 13.0 would move
            # the wait up, as it may, or because it reuses those registers: 4 % of the
            # time at a prefix of 8,192 tokens.
            pin(new_weights, last_slot, seq_len)
            out = acc_ref[...]
            pin(weights, last_slot, seq_len)
            return out, new_weights, new_largest, new_total, rescale

        out = pl.run_scoped(body, logits_type, acc_type)
        acc, weights, largest, total, rescale = out
        plgpu.barrier_arrive(refs.v_free.at[last_slot])
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
        return acc, weights.astype(value_dtype(steps.problem)), largest, total

    acc, largest, _ = steps.start()
    weights, largest, total = first_step(largest)
    carry = (acc, weights, largest, total)
    acc, weights, largest, total = steps.run(step, carry, first=1)
    last_slot = steps.slot(item.num_tiles - 1)

    def last(acc_ref):
        acc_ref[...] = acc
        plgpu.barrier_wait(refs.v_full.at[last_slot])
        steps.start_output(acc_ref, weights, item.num_tiles - 1)
        return acc_ref[...]

    acc = pl.run_scoped(last, acc_type)
    plgpu.barrier_arrive(refs.v_free.at[last_slot])
    return acc, largest, total


def _attend_in_turn(steps: _Steps) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes the products of each step after each other, weights by shared memory."""
    refs = steps.refs
    weights_smem = refs.weights_smem.at[steps.warpgroup]

    def step(i, carry, *, masked):
        acc, largest, total = carry
        slot = steps.slot(i)

        def logits(logits_ref):
            steps.start_logits(logits_ref, i)
            return logits_ref[...]

        def output(acc_ref):
            steps.start_output(acc_ref, weights_smem, i)
            return acc_ref[...]

        plgpu.barrier_wait(refs.k_full.at[slot])
        logits_type = plgpu.ACC((ROWS, steps.config.block_kv), jnp.float32)
        x = pl.run_scoped(logits, logits_type)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        weights, largest, rescale = steps.softmax(x, i, largest, masked=masked)
        total = total * rescale + weights.sum(axis=1)
        weights_smem[...] = weights.astype(value_dtype(steps.problem))
        plgpu.commit_smem()
        plgpu.barrier_wait(refs.v_full.at[slot])
        out = pl.run_scoped(output, plgpu.ACC(acc.shape, jnp.float32))
        plgpu.barrier_arrive(refs.v_free.at[slot])
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0]) + out
        return acc, largest, total

    return steps.run(step, steps.start(), first=0)
