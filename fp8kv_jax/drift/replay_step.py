"""One step of a replay: the same tokens through a wide cache and through FP8."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from fp8kv_jax.attention import Step, attend, begin_step, end_step
from fp8kv_jax.batch import Batch
from fp8kv_jax.cache import CacheConfig, PagedKVCache, init_cache
from fp8kv_jax.calibration import (
    CalibrationConfig,
    CalibrationState,
    init_calibration,
)
from fp8kv_jax.decode import Forward
from fp8kv_jax.drift.quality import TokenQuality, compare_logits
from fp8kv_jax.drift.range import Reading, add_by_slice, read_range
from fp8kv_jax.scales.scale_set import ScaleSet
from pallas_kernels.dispatch import Implementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A cache and its scales: one of the two runs."""

    cache: PagedKVCache
    calibration: CalibrationState


class Measured(NamedTuple):
    """What a step measured; the readings and errors are sums over its real tokens.

    Attributes:
      quality: token by token, padding included.
      error, norm: squared error of the attention output, and its square.
      reading: keys and values of the FP8 layers, stacked `[2, fp8_layers, ...]`.
    """

    quality: TokenQuality
    error: Float32[Array, "num_layers num_slices num_kv_heads"]
    norm: Float32[Array, "num_layers num_slices num_kv_heads"]
    reading: Reading


type ReplayStep = Callable[..., tuple[Lane, Lane, Measured]]

_NO_CALIBRATION = CalibrationConfig(window_tokens=0)


def make_lane(cache: CacheConfig, scales: ScaleSet | None) -> Lane:
    """Makes an empty cache whose FP8 layers have given scales."""
    calibration = init_calibration(
        _NO_CALIBRATION, cache, max_tokens_per_step=1, scales=scales
    )
    return Lane(cache=init_cache(cache), calibration=calibration)


@functools.lru_cache(maxsize=8)  # several replays of one model compile once
def make_replay_step(
    forward: Forward,
    *,
    num_slices: int,
    top_k: int,
    small_margin: float,
    implementation: Implementation | None = None,
) -> ReplayStep:
    """Makes the jitted step; it donates both lanes.

    Args:
      forward: the model.
      num_slices: slices that a token may belong to.
      top_k: as in `compare_logits`.
      small_margin: likewise.
      implementation: which kernels to use; None for the best that works.

    Returns:
      `(params, wide, fp8, batch, labels, slices, inv_scales) -> (wide, fp8, measured)`,
      where `labels` are the tokens that follow, `slices` those of each token
      (`num_slices` for padding) and `inv_scales` of the FP8 layers, `[2, layers,
      heads]`, what the range is read against.
    """

    def run(
        params: Any,
        wide: Lane,
        fp8: Lane,
        batch: Batch,
        labels: Int32[Array, "num_tokens"],
        slices: Int32[Array, "num_tokens dimensions"],
        inv_scales: Float32[Array, "2 fp8_layers num_kv_heads"],
    ) -> tuple[Lane, Lane, Measured]:
        model = functools.partial(forward, params, batch.token_ids, batch.positions)
        fp8_layers = fp8.calibration.fp8_layers
        step = begin_lane(wide, batch, implementation)
        full, step, outs, rows = _wide_pass(model, step, fp8_layers, implementation)
        wide = end_lane(step, implementation)
        step = begin_lane(fp8, batch, implementation)
        narrow, step, errors = _fp8_pass(model, step, outs, implementation)
        fp8 = end_lane(step, implementation)
        # [layers, 2, tokens, heads] -> [tokens, 2, layers, heads] -> by slice
        error, norm = jnp.moveaxis(
            add_by_slice(errors.transpose(2, 1, 0, 3), slices, num_slices), 0, 2
        )
        quality = compare_logits(
            full.reshape(-1, full.shape[-1]),
            narrow.reshape(-1, narrow.shape[-1]),
            labels,
            top_k=top_k,
            small_margin=small_margin,
        )
        reading = _read_layers(rows, slices, inv_scales, num_slices=num_slices)
        measured = Measured(quality=quality, error=error, norm=norm, reading=reading)
        return wide, fp8, measured

    return jax.jit(run, donate_argnums=(1, 2))


def _wide_pass(model, step, fp8_layers, implementation):
    """Runs the model; also returns each layer's output and the FP8 layers' K and V."""

    def keep(carry, layer, q, k, v, **options):
        step, outs, rows = carry
        out, step = attend(
            step, layer, q, k, v, **options, implementation=implementation
        )
        if layer in fp8_layers:
            rows = (*rows, *(x.reshape(-1, *x.shape[2:]) for x in (k, v)))
        return out, (step, (*outs, out), rows)

    logits, (step, outs, rows) = model(keep, (step, (), ()))
    return logits, step, outs, rows


def _fp8_pass(model, step, outs, implementation):
    """Runs the model; also returns each layer's squared errors against `outs`."""

    def compare(carry, layer, q, k, v, **options):
        step, errors = carry
        out, step = attend(
            step, layer, q, k, v, **options, implementation=implementation
        )
        error = squares_by_head(out, outs[layer], num_kv_heads=k.shape[2])
        return out, (step, (*errors, jnp.stack(error)))

    logits, (step, errors) = model(compare, (step, ()))
    return logits, step, jnp.stack(errors)


def _read_layers(
    rows: tuple[Float[Array, "num_tokens num_kv_heads head_dim"], ...],
    slices: Int32[Array, "num_tokens dimensions"],
    inv_scales: Float32[Array, "2 fp8_layers num_kv_heads"],
    *,
    num_slices: int,
) -> Reading:
    """Reads the range of K and V, which alternate in `rows`, layer by layer."""

    # A loop: a compiler that unrolls it spends a second on each layer.
    def one(args):
        values, inverse = args
        return read_range(values, inverse, slices, num_slices=num_slices)

    inverses = inv_scales.swapaxes(0, 1).reshape(len(rows), -1)
    reading = lax.map(one, (jnp.stack(rows), inverses))
    return jax.tree.map(
        lambda x: x.reshape(-1, 2, *x.shape[1:]).swapaxes(0, 1), reading
    )


def begin_lane(lane: Lane, batch: Batch, implementation: Implementation | None) -> Step:
    """`begin_step` on a lane."""
    return begin_step(
        lane.cache, lane.calibration, batch, implementation=implementation
    )


def end_lane(step: Step, implementation: Implementation | None) -> Lane:
    """`end_step`, which gives the lane back."""
    cache, calibration = end_step(step, implementation=implementation)
    return Lane(cache=cache, calibration=calibration)


def squares_by_head(
    out: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    want: Float[Array, "num_seqs num_queries num_q_heads head_dim"],
    *,
    num_kv_heads: int,
) -> tuple[Float32[Array, "num_tokens heads"], Float32[Array, "num_tokens heads"]]:
    """Squared error and squared size by token, over the queries of each KV head."""
    num_tokens = out.shape[0] * out.shape[1]
    out, want = (
        x.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1) for x in (out, want)
    )
    return jnp.sum((out - want) ** 2, axis=2), jnp.sum(want**2, axis=2)


def with_scales(
    lane: Lane, scale: Float32[Array, "2 l h"], inv_scale: Float32[Array, "2 l h"]
) -> Lane:
    """Puts scales of all FP8 layers, keys first, into a lane of granularity "head"."""
    calibration = replace(
        lane.calibration,
        k_scale=scale[0],
        v_scale=scale[1],
        k_inv_scale=inv_scale[0],
        v_inv_scale=inv_scale[1],
    )
    return replace(lane, calibration=calibration)
