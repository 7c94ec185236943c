"""New scales for a frozen cache: all live pages are rewritten, or nothing changes."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from fp8kv_jax.cache import PagedKVCache
from fp8kv_jax.calibration import CalibrationState, Groups, is_scale, scale_of
from fp8kv_jax.parallel import Placement
from fp8kv_jax.sharded_ops import requantize_pages
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8 import saturating_cast
from pallas_kernels.pages.layout import as_bits, as_floats


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class NewScales:
    """Scales to move to, and what they rest on: each `[fp8_layers, groups]`."""

    k_scale: Groups
    v_scale: Groups
    k_amax: Groups
    v_amax: Groups


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AddedError:
    """What a rewrite cost: norm of the change over norm of what stood there before.

    Both over all finite values of a group's pool. A value that is rewritten is rounded
    once more, by at most 2^-4 of itself; a scale that moves by a power of two rounds
    none of those in its normal range.
    """

    k: Groups
    v: Groups


def moving_scales(state: CalibrationState, *, decay: float = 0.9) -> NewScales:
    """Moves each amax toward what was seen since the scales are final.

    `amax = decay * amax + (1 - decay) * live_amax`, and `scale = amax * C`, as at the
    freeze. Nothing moves by itself: hand the result to `recalibrate`. A group that saw
    nothing keeps its scale.

    Args:
      state: a frozen state.
      decay: share of the old amax, within [0, 1].

    Raises:
      ValueError: if decay is not a share.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"Expected decay to be within [0, 1], got {decay}.")

    def move(amax: Groups, live: Groups, scale: Groups) -> tuple[Groups, Groups]:
        # A scale from elsewhere may come without its amax: it covers this much.
        amax = jnp.where(amax > 0, amax, scale / state.scale_per_amax)
        moved = jnp.where(live > 0, decay * amax + (1 - decay) * live, amax)
        new = scale_of(moved, state.scale_per_amax)
        return jnp.where(live > 0, new, scale), moved

    k_scale, k_amax = move(state.k_amax, state.k_live_amax, state.k_scale)
    v_scale, v_amax = move(state.v_amax, state.v_live_amax, state.v_scale)
    return NewScales(k_scale=k_scale, v_scale=v_scale, k_amax=k_amax, v_amax=v_amax)


def recalibrate(
    cache: PagedKVCache,
    state: CalibrationState,
    new: NewScales,
    *,
    implementation: Implementation | None = None,
    placement: Placement | None = None,
) -> tuple[AddedError, PagedKVCache, CalibrationState]:
    """Moves a frozen cache to new scales, rewriting every page, in one transaction.

    Jit it with `donate_argnums=(0, 1)`. New pools and new scales come together, one
    epoch later, so that one basis holds before and after. Before the freeze, and for
    scales that are not finite and positive, nothing changes: the epoch tells.

    Args:
      cache: pools; donate them.
      state: donate it.
      new: from `moving_scales`, or anybody's.
      implementation: which kernels to use; None for the best that works.
      placement: how heads and pages lie on a mesh; None for one device.

    Returns:
      The rounding error that the rewrite added, the cache and the state.
    """
    good = is_scale(jnp.stack([new.k_scale, new.v_scale]))

    def rewrite(
        cache: PagedKVCache, state: CalibrationState
    ) -> tuple[AddedError, PagedKVCache, CalibrationState]:
        # Made here, once, as at the freeze; whoever reads carries them.
        k_inv_scale, v_inv_scale = 1 / new.k_scale, 1 / new.v_scale
        moved = replace(
            state,
            k_scale=new.k_scale,
            v_scale=new.v_scale,
            k_inv_scale=k_inv_scale,
            v_inv_scale=v_inv_scale,
            k_amax=new.k_amax,
            v_amax=new.v_amax,
            k_live_amax=jnp.zeros_like(state.k_live_amax),
            v_live_amax=jnp.zeros_like(state.v_live_amax),
            epoch=state.epoch + 1,
        )
        errors, cache = _rewrite_pools(cache, state, moved, implementation, placement)
        return errors, cache, moved

    def keep(
        cache: PagedKVCache, state: CalibrationState
    ) -> tuple[AddedError, PagedKVCache, CalibrationState]:
        none = AddedError(
            k=jnp.zeros_like(state.k_scale), v=jnp.zeros_like(state.v_scale)
        )
        return none, cache, state

    moving = state.frozen & jnp.all(good)
    errors, cache, state = lax.cond(moving, rewrite, keep, cache, state)
    if placement is not None:
        cache, state = placement.constrain((cache, state))
    return errors, cache, state


def _rewrite_pools(
    cache: PagedKVCache,
    old: CalibrationState,
    new: CalibrationState,
    implementation: Implementation | None,
    placement: Placement | None,
) -> tuple[AddedError, PagedKVCache]:
    k_pages, v_pages = list(cache.k_pages), list(cache.v_pages)
    k_errors, v_errors = [], []
    groups = old.k_scale.shape[1]
    for row, layer in enumerate(old.fp8_layers):
        pools = k_pages[layer], v_pages[layer]
        k_errors.append(_added_error(pools[0], groups, old.k_scale[row], new, "k", row))
        v_errors.append(_added_error(pools[1], groups, old.v_scale[row], new, "v", row))
        # Measured before the pools are given up: else XLA keeps copies of them.
        *pools, k_errors[-1], v_errors[-1] = lax.optimization_barrier(
            (*pools, k_errors[-1], v_errors[-1])
        )
        k_pages[layer], v_pages[layer] = requantize_pages(
            placement,
            (pools[0], pools[1]),
            {
                "k_scale": old.k_scale[row],
                "v_scale": old.v_scale[row],
                "k_inv_scale": new.k_inv_scale[row],
                "v_inv_scale": new.v_inv_scale[row],
            },
            implementation=implementation,
        )
    cache = PagedKVCache(k_pages=tuple(k_pages), v_pages=tuple(v_pages))
    return AddedError(k=jnp.stack(k_errors), v=jnp.stack(v_errors)), cache


def _added_error(
    pages: Array,
    groups: int,
    old_scale: Float32[Array, "groups"],
    new: CalibrationState,
    which: str,
    row: int,
) -> Float32[Array, "groups"]:
    """Relative error of a pool's values, by group, if it is rewritten."""
    codes = as_floats(as_bits(pages), pages.dtype)
    num_pages, num_heads = codes.shape[:2]
    codes = codes.reshape(num_pages, groups, num_heads // groups, -1)

    def wide(scale: Float32[Array, "groups"]) -> Array:
        return scale[None, :, None, None]

    new_scale = getattr(new, f"{which}_scale")[row]
    before = codes.astype(jnp.float32) * wide(old_scale)
    after = saturating_cast(before * wide(getattr(new, f"{which}_inv_scale")[row]))
    # XLA on the GPU deletes a round trip through FP8 unless it is kept apart.
    after = lax.optimization_barrier(after).astype(jnp.float32) * wide(new_scale)
    finite = jnp.isfinite(before)
    axes = (0, 2, 3)
    change = jnp.sum(jnp.where(finite, after - before, 0.0) ** 2, axis=axes)
    size = jnp.sum(jnp.where(finite, before, 0.0) ** 2, axis=axes)
    return jnp.sqrt(jnp.where(size > 0, change / jnp.where(size > 0, size, 1.0), 0.0))
