"""Online calibration of FP8 scales: what was observed, which scales follow, and when.

The state is immutable and has one tree structure from `init_calibration` to the end:
the phase is an array, so one compilation serves the window, the freeze and after.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from fp8kv_jax import counters as counter
from fp8kv_jax.cache import CacheConfig, PagedKVCache, init_cache
from fp8kv_jax.drift.telemetry import Telemetry, init_telemetry
from fp8kv_jax.staging import StagedWindow, disown_all, init_window
from pallas_kernels.fp8 import FP8_MAX, RowStatistics

if TYPE_CHECKING:
    from fp8kv_jax.scales.scale_set import ScaleSet

type Granularity = Literal["tensor", "head"]
type Groups = Float32[Array, "fp8_layers groups"]

SCALE_MIN, SCALE_MAX = 2.0**-100, 2.0**100
# What the counters of a state are kept apart by.
PROVISIONAL, FROZEN = 0, 1


def scale_per_amax(headroom: float) -> np.float32:
    """The one constant of the scale rule, made on the host: float32(headroom / 448)."""
    return np.float32(headroom / FP8_MAX)


def scale_of(amax: Any, per_amax: Any) -> Any:
    """The scale rule, in float32: `amax * scale_per_amax`, clamped; numpy or jnp."""
    return (amax * per_amax).clip(SCALE_MIN, SCALE_MAX)


def is_scale(values: Any) -> Any:
    """Says which values may be scales: not NaN, Inf, zero or less; numpy or jnp."""
    return (values >= SCALE_MIN) & (values <= SCALE_MAX)


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How scales are found, checked when built.

    Args:
      window_tokens: real tokens observed before the scales freeze. 1 freezes on the
        first batch; 0 means no online calibration, and scales must be given.
      headroom: ratio >= 1 between the largest value that the frozen scale covers and
        the amax; less than 1 would clip what was seen and is raised to 1 with a
        warning.
      granularity: "tensor", one scale for a layer's K and one for its V, or "head",
        one for each KV head.
      provisional_scale: scale of K and V inside the window. It only has to cover
        the values: everything written with it is rewritten at the freeze.
      max_window_tokens: the largest window; a longer one is cut with a warning,
        because its BF16 rows are held in memory.
    """

    window_tokens: int = 256
    headroom: float = 2.0
    granularity: Granularity = "tensor"
    provisional_scale: float = 2.0
    max_window_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "head"):
            raise ValueError(
                "Expected granularity to be 'tensor' or 'head', "
                f"got {self.granularity!r}."
            )
        if self.window_tokens < 0 or self.max_window_tokens < 1:
            raise ValueError(
                "Expected window_tokens >= 0 and max_window_tokens >= 1, "
                f"got {self.window_tokens} and {self.max_window_tokens}."
            )
        if not math.isfinite(self.headroom) or self.headroom <= 0:
            raise ValueError(
                f"Expected headroom to be a finite number from 1 on, "
                f"got {self.headroom}."
            )
        if not SCALE_MIN <= self.provisional_scale <= SCALE_MAX:
            raise ValueError(
                "Expected provisional_scale to be within [2^-100, 2^100], "
                f"got {self.provisional_scale}."
            )
        if self.headroom < 1:
            self._clamp("headroom", 1.0, "less than 1 clips values that were seen")
        if self.window_tokens > self.max_window_tokens:
            self._clamp(
                "window_tokens",
                self.max_window_tokens,
                "the staged window is held in memory; raise max_window_tokens",
            )

    def _clamp(self, name: str, value: float, reason: str) -> None:
        message = f"{name} {getattr(self, name)} is set to {value}: {reason}."
        warnings.warn(message, UserWarning, stacklevel=4)
        object.__setattr__(self, name, value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Counts of values by phase, FP8 layer and group; see `RowStatistics`.

    One array of all three, in the order of the properties: one kernel adds to it.
    """

    counts: counter.Counter

    @property
    def saturated(self) -> counter.Counter:
        return self.counts[0]

    @property
    def underflowed(self) -> counter.Counter:
        return self.counts[1]

    @property
    def nonfinite(self) -> counter.Counter:
        return self.counts[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationState:
    """Scales of every FP8 layer and what they rest on; donate it to the step.

    Rows of the `[fp8_layers, groups]` arrays follow `fp8_layers`; `groups` is 1
    (granularity "tensor") or the number of KV heads.

    Attributes:
      k_amax, v_amax: largest finite value that the scales rest on.
      k_live_amax, v_live_amax: largest finite value since the scales are final.
      k_scale, v_scale: multipliers out of FP8, provisional until frozen.
      k_inv_scale, v_inv_scale: their reciprocals, made once with them: a last-bit
        difference in the inverse would change 0.3 % of the codes.
      scale_per_amax: float32(headroom / 448), made on the host so that no compiler
        folds it differently.
      tokens_seen: real tokens observed; stands still after the freeze.
      batches_seen: batches with a real token among them.
      window: how many tokens freeze the scales.
      frozen: whether the scales are final.
      num_requantized: slots rewritten by the freeze.
      num_dropped: tokens whose slot lay past the pool; they are nobody's.
      epoch: counts freezes and resets: pages of another epoch must not be read.
      k_tally, v_tally: saturated, underflowed and non-finite values.
      staged: the window's BF16 rows, or None once released.
      telemetry: what live traffic says about final scales, or None if not asked for.
      fp8_layers: layers whose pools hold FP8.
      calibrating_layers: those of them whose scales are found online.
      window_rows: rows that the staged window can hold.
      max_tokens_per_step: largest `Batch.num_tokens` that the window has room for.
    """

    k_amax: Groups
    v_amax: Groups
    k_live_amax: Groups
    v_live_amax: Groups
    k_scale: Groups
    v_scale: Groups
    k_inv_scale: Groups
    v_inv_scale: Groups
    scale_per_amax: Float32[Array, ""]
    provisional_scale: Float32[Array, ""]
    tokens_seen: Int32[Array, ""]
    batches_seen: Int32[Array, ""]
    window: Int32[Array, ""]
    frozen: Bool[Array, ""]
    num_requantized: Int32[Array, ""]
    num_dropped: counter.Counter
    epoch: Int32[Array, ""]
    k_tally: Tally
    v_tally: Tally
    staged: StagedWindow | None
    telemetry: Telemetry | None = None
    fp8_layers: tuple[int, ...] = field(metadata={"static": True})
    calibrating_layers: tuple[int, ...] = field(metadata={"static": True})
    window_rows: int = field(metadata={"static": True})
    max_tokens_per_step: int = field(metadata={"static": True})

    @property
    def calibrates(self) -> np.ndarray:
        """Which rows belong to calibrating layers: bool [fp8_layers, 1]."""
        return np.isin(self.fp8_layers, self.calibrating_layers)[:, None]

    @property
    def inside(self) -> Bool[Array, "fp8_layers 1"]:
        """Which rows still hold the provisional scale of an open window."""
        return ~self.frozen & self.calibrates

    @property
    def no_signal(self) -> tuple[Bool[Array, "fp8_layers groups"], ...]:
        """Groups of K and of V that froze on zeros and keep the provisional scale."""
        calibrated = self.frozen & self.calibrates
        return calibrated & (self.k_amax == 0), calibrated & (self.v_amax == 0)

    def row_of(self, layer: int) -> int | None:
        """The row of an FP8 layer in the state's arrays; None for other layers."""
        return self.fp8_layers.index(layer) if layer in self.fp8_layers else None


def init_calibration(
    config: CalibrationConfig,
    cache: CacheConfig,
    *,
    max_tokens_per_step: int,
    scales: "ScaleSet | None" = None,
    num_window_rows: int | None = None,
    telemetry: bool = False,
) -> CalibrationState:
    """Makes the state of a loop that has seen nothing yet.

    Layers that `scales` covers are static: they keep their scales and observe
    nothing. The other FP8 layers calibrate over the window.

    Args:
      config: how scales are found.
      cache: the cache whose FP8 layers need scales.
      max_tokens_per_step: the largest `Batch.num_tokens` of any step inside the
        window, padding included.
      scales: scales that are known already, checked here. Their granularity is the
        state's; layers they skip belong into the cache's `high_precision_layers`, or
        calibrate.
      num_window_rows: rows to hold, if more than the window needs: so that states of
        several windows share one compilation.
      telemetry: also count, inside the step, how live rows fit final scales; see
        `fp8kv_jax.drift.telemetry`.

    Returns:
      A state that owns its buffers; frozen from the start if no layer calibrates.

    Raises:
      ValueError: if the window is 0 and a layer has no scales.
      ScaleError: (a ValueError) if the scales do not fit the cache.
    """
    layers = cache.fp8_layers
    calibrating = _calibrating_layers(config, layers, scales)
    granularity = scales.granularity if scales is not None else config.granularity
    groups = cache.num_kv_heads if granularity == "head" else 1
    needed = config.window_tokens - 1 + max_tokens_per_step
    fields = _unobserved(len(layers), groups, config.provisional_scale)
    if scales is not None:
        fields |= _static_rows(fields, cache, scales)
    state = CalibrationState(
        **fields,
        scale_per_amax=jnp.float32(scale_per_amax(config.headroom)),
        provisional_scale=jnp.float32(config.provisional_scale),
        window=jnp.int32(config.window_tokens),
        frozen=jnp.array(not calibrating),
        epoch=jnp.int32(0),
        staged=None,
        telemetry=init_telemetry(cache) if telemetry else None,
        fp8_layers=layers,
        calibrating_layers=calibrating,
        window_rows=max(needed, num_window_rows or 0),
        max_tokens_per_step=max_tokens_per_step,
    )
    if not calibrating:
        return state
    shapes = jax.eval_shape(lambda: init_cache(cache))
    return replace(state, staged=init_window(shapes, calibrating, state.window_rows))


def _calibrating_layers(
    config: CalibrationConfig, layers: tuple[int, ...], scales: "ScaleSet | None"
) -> tuple[int, ...]:
    covered = scales.layers if scales is not None else ()
    calibrating = tuple(layer for layer in layers if layer not in covered)
    if calibrating and config.window_tokens == 0:
        raise ValueError(
            "Expected window_tokens of at least 1: a window of 0 tokens means no "
            f"online calibration, and no scales are given for layers {calibrating}. "
            "Give them, or put the layers into high_precision_layers."
        )
    return calibrating


def _static_rows(fields: dict, cache: CacheConfig, scales: "ScaleSet") -> dict:
    """Checks given scales, puts them into their rows, and what is known of their amax."""
    scales.check(num_layers=cache.num_layers, num_kv_heads=cache.num_kv_heads)
    layers = cache.fp8_layers
    rows = [i for i, layer in enumerate(layers) if layer in scales.layers]
    source = [scales.layers.index(layers[i]) for i in rows]

    def put(name: str) -> Groups:
        filled = np.array(fields[name])
        filled[rows] = np.nan_to_num(getattr(scales, name)[source], nan=0.0)
        return jnp.asarray(filled)

    kinds = ("scale", "inv_scale", "amax")
    return {name: put(name) for kind in kinds for name in (f"k_{kind}", f"v_{kind}")}


def _unobserved(num_layers: int, groups: int, provisional_scale: float) -> dict:
    """The fields that a reset puts back: nothing seen, provisional scales."""

    def full(value: float) -> Groups:
        return jnp.full((num_layers, groups), value, jnp.float32)

    def tally() -> Tally:
        return Tally(counts=counter.zeros(3, 2, num_layers, groups))

    return {
        "k_amax": full(0),
        "v_amax": full(0),
        "k_live_amax": full(0),
        "v_live_amax": full(0),
        "k_scale": full(provisional_scale),
        "v_scale": full(provisional_scale),
        "k_inv_scale": full(1 / provisional_scale),
        "v_inv_scale": full(1 / provisional_scale),
        "tokens_seen": jnp.int32(0),
        "batches_seen": jnp.int32(0),
        "num_requantized": jnp.int32(0),
        "num_dropped": counter.zeros(),
        "k_tally": tally(),
        "v_tally": tally(),
    }


def observe(
    state: CalibrationState,
    k: RowStatistics,
    v: RowStatistics,
    *,
    num_tokens: Int32[Array, ""],
) -> CalibrationState:
    """Folds one batch into the statistics; amax and tokens only until frozen.

    Args:
      state: the state whose scales quantized the batch.
      k: statistics of the batch's keys, each field `[fp8_layers, num_kv_heads]`.
      v: likewise of its values.
      num_tokens: real tokens of the batch.
    """
    inside = state.inside
    groups = state.k_amax.shape[1]

    def amax(
        old: Groups, new: Float32[Array, "fp8_layers num_kv_heads"], listening: Array
    ) -> Groups:
        new = _by_group(new, groups, jnp.max)
        return jnp.where(listening, jnp.maximum(old, new), old)

    seen = jnp.where(state.frozen, 0, num_tokens)
    return replace(
        state,
        k_amax=amax(state.k_amax, k.amax, inside),
        v_amax=amax(state.v_amax, v.amax, inside),
        k_live_amax=amax(state.k_live_amax, k.amax, ~inside),
        v_live_amax=amax(state.v_live_amax, v.amax, ~inside),
        tokens_seen=state.tokens_seen + seen,
        batches_seen=state.batches_seen + (seen > 0).astype(jnp.int32),
        k_tally=_count(state.k_tally, k, inside, groups),
        v_tally=_count(state.v_tally, v, inside, groups),
    )


def _by_group(x: Array, groups: int, reduce) -> Array:
    """Reduces `[fp8_layers, num_kv_heads]` to `[fp8_layers, groups]`."""
    return reduce(x.reshape(x.shape[0], groups, -1), axis=2)


def _count(
    tally: Tally, new: RowStatistics, inside: Bool[Array, "fp8_layers 1"], groups: int
) -> Tally:
    kinds = new.num_saturated, new.num_underflowed, new.num_nonfinite
    counts = jnp.stack([_by_group(values, groups, jnp.sum) for values in kinds])
    # In the order of PROVISIONAL and FROZEN. A static layer has no window to be in.
    phase = jnp.stack([inside, ~inside])
    both = jnp.where(phase[None], counts[:, None].astype(jnp.int32), 0)
    return Tally(counts=counter.add(tally.counts, both))


def window_is_complete(state: CalibrationState) -> Bool[Array, ""]:
    """Says whether the scales should freeze now."""
    return ~state.frozen & (state.tokens_seen >= state.window)


def freeze(state: CalibrationState) -> CalibrationState:
    """Computes the final scales: `amax * float32(headroom / 448)`, clamped.

    A group that saw only zeros is no evidence: it keeps the provisional scale and
    shows in `no_signal`.
    """

    def final(amax: Groups, scale: Groups, inv_scale: Groups) -> tuple[Groups, Groups]:
        has_signal = (amax > 0) & state.calibrates
        new = scale_of(amax, state.scale_per_amax)
        return (
            jnp.where(has_signal, new, scale),
            jnp.where(has_signal, 1 / new, inv_scale),
        )

    k_scale, k_inv_scale = final(state.k_amax, state.k_scale, state.k_inv_scale)
    v_scale, v_inv_scale = final(state.v_amax, state.v_scale, state.v_inv_scale)
    return replace(
        state,
        k_scale=k_scale,
        v_scale=v_scale,
        k_inv_scale=k_inv_scale,
        v_inv_scale=v_inv_scale,
        frozen=jnp.ones_like(state.frozen),
        epoch=state.epoch + 1,
    )


def release_window(state: CalibrationState) -> CalibrationState:
    """Gives the staged window's memory back once the scales are frozen.

    The state then has another tree structure: the step compiles once more, without
    staging, freeze and requantize, to bit-equal results.

    Raises:
      ValueError: if the scales are not frozen yet (reads the device).
    """
    if not bool(state.frozen):
        raise ValueError(
            f"Expected frozen scales, got {int(state.tokens_seen)} of "
            f"{int(state.window)} tokens: the window is still needed."
        )
    return replace(state, staged=None)


def reset(
    cache: PagedKVCache, state: CalibrationState
) -> tuple[PagedKVCache, CalibrationState]:
    """Re-arms the calibration and invalidates every page, as new weights require.

    Pools are zeroed, so that nothing written under the old weights or scales can be
    read; the caller drops its block tables, and pages kept elsewhere are stale by
    their `epoch`.

    Args:
      cache: donate it.
      state: donate it; a released window is made anew. Static layers keep the scales
        they were given, which belong to the weights before: make a state anew from
        scales of the new weights.

    Returns:
      An empty cache and a state that has seen nothing, one epoch later.
    """
    cache = jax.tree.map(jnp.zeros_like, cache)
    num_layers, groups = state.k_amax.shape
    staged = state.staged
    if staged is not None:
        staged = disown_all(staged)
    elif state.calibrating_layers:
        staged = init_window(cache, state.calibrating_layers, state.window_rows)
    fresh = _unobserved(num_layers, groups, 1.0)
    provisional = jnp.broadcast_to(state.provisional_scale, state.k_scale.shape)
    calibrates = state.calibrates
    scales = {
        name: jnp.where(calibrates, value, getattr(state, name))
        for name, value in {
            "k_amax": fresh["k_amax"],
            "v_amax": fresh["v_amax"],
            "k_scale": provisional,
            "v_scale": provisional,
            "k_inv_scale": 1 / provisional,
            "v_inv_scale": 1 / provisional,
        }.items()
    }
    fresh |= scales
    frozen = jnp.full_like(state.frozen, not state.calibrating_layers)
    return cache, replace(
        state,
        **fresh,
        frozen=frozen,
        epoch=state.epoch + 1,
        staged=staged,
        telemetry=jax.tree.map(jnp.zeros_like, state.telemetry),
    )


def graphs_ready(states: Iterable[CalibrationState | bool | None]) -> bool:
    """Says whether everything that calibrates is frozen, so that graphs may be kept.

    Args:
      states: for each layer (or each cache) its state, whether it is frozen, or None
        where it does not calibrate.

    Returns:
      True for no states at all. Reads the device.
    """
    frozen = [s.frozen if isinstance(s, CalibrationState) else s for s in states]
    return all(bool(f) for f in frozen if f is not None)
