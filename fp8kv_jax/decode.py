"""Prefill and decode steps made from a model's forward function."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float, Int32

from fp8kv_jax.attention import attend, begin_step, end_step
from fp8kv_jax.batch import Batch, MixedBatch
from fp8kv_jax.cache import PagedKVCache
from fp8kv_jax.calibration import CalibrationState
from fp8kv_jax.parallel import Placement
from pallas_kernels.dispatch import Implementation


class Forward(Protocol):
    """A model as a pure function that hands each layer's q, k and v to `attend`.

    `attend(carry, layer, q, k, v, *, softmax_scale, sliding_window, logit_soft_cap)`
    returns the attention output and the carry for the next layer. With `logits_at`,
    only the logits of one query of each sequence are computed; of a single row of
    tokens, as a `MixedBatch` is, it may name any number of queries.
    """

    def __call__(
        self,
        params: Any,
        token_ids: Int32[Array, "num_seqs num_queries"],
        positions: Int32[Array, "num_seqs num_queries"],
        attend: Callable[..., tuple[Array, Any]],
        carry: Any,
        *,
        logits_at: Int32[Array, "num_logits"] | None = None,
    ) -> tuple[Array, Any]: ...


type StepFunction = Callable[
    [Any, PagedKVCache, CalibrationState, Batch | MixedBatch],
    tuple[Float[Array, "..."], PagedKVCache, CalibrationState],
]


class Steps(NamedTuple):
    """Pure functions `(params, cache, calibration, batch) -> (logits, cache, calibration)`.

    All take any `Batch`; they differ in the logits they return. Jit each with
    `donate_argnums=(1, 2)`.

    Attributes:
      prefill_step: several new tokens of each sequence; logits of the newest one,
        `[num_seqs, vocab_size]`. Takes a `MixedBatch` too.
      decode_step: one new token of each sequence; logits `[num_seqs, vocab_size]`.
      score_step: logits of every token, `[num_seqs, num_queries, vocab_size]`.
    """

    prefill_step: StepFunction
    decode_step: StepFunction
    score_step: StepFunction


def make_steps(
    forward: Forward,
    *,
    implementation: Implementation | None = None,
    placement: Placement | None = None,
) -> Steps:
    """Makes the steps of a serving loop from a model's forward function.

    One compilation of a step serves the window, the freeze and the time after it.
    Once the scales are frozen, a state from `release_window` compiles a step without
    staging, to bit-equal results.

    Args:
      forward: see `Forward`.
      implementation: which kernels to use; None for the best that works.
      placement: how cache, state and batches lie on a mesh, which come and go as
        `Placement.shardings` says; None for one device.
    """

    attend_in = functools.partial(attend, implementation=implementation)

    def run(
        params: Any,
        cache: PagedKVCache,
        calibration: CalibrationState,
        batch: Batch | MixedBatch,
        logits_at: Int32[Array, "num_seqs"] | None,
    ) -> tuple[Array, PagedKVCache, CalibrationState]:
        step = begin_step(
            cache,
            calibration,
            batch,
            implementation=implementation,
            placement=placement,
        )
        logits, step = forward(
            params,
            batch.token_ids,
            batch.positions,
            attend_in,
            step,
            logits_at=logits_at,
        )
        return logits, *end_step(step, implementation=implementation)

    def prefill_step(params, cache, calibration, batch):
        return run(params, cache, calibration, batch, batch.last_query)

    def decode_step(params, cache, calibration, batch):
        if batch.slot_mapping.shape[1] != 1:
            raise ValueError(
                "Expected one new token of each sequence in a decode step, got "
                f"{batch.slot_mapping.shape[1]}: use prefill_step."
            )
        return prefill_step(params, cache, calibration, batch)

    def score_step(params, cache, calibration, batch):
        return run(params, cache, calibration, batch, None)

    return Steps(prefill_step, decode_step, score_step)
