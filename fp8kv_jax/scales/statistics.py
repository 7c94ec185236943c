"""What offline calibration has observed so far, and the one rule that merges it."""

from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Float32, Int64, UInt8

from fp8kv_jax.calibration import Granularity, scale_of, scale_per_amax
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

# What a group without signal is written with, as in the online calibration: it covers
# +-896, and a reader sees the group listed.
NO_SIGNAL_SCALE = np.float32(2.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class AmaxState:
    """Statistics of a calibration run on the host: a pytree of numpy arrays.

    Attributes:
      k_amax, v_amax: largest finite value of each KV head, after rounding to BF16.
      k_nonfinite, v_nonfinite: how many values were NaN or Inf.
      num_tokens, num_samples: how many of each data class were observed.
      next_batch: the first batch of the plan that is not in here yet.
      fingerprint: SHA-256 of the run: states of different runs must not merge.
    """

    k_amax: Float32[np.ndarray, "num_layers num_kv_heads"]
    v_amax: Float32[np.ndarray, "num_layers num_kv_heads"]
    k_nonfinite: Int64[np.ndarray, "num_layers num_kv_heads"]
    v_nonfinite: Int64[np.ndarray, "num_layers num_kv_heads"]
    num_tokens: Int64[np.ndarray, "num_classes"]
    num_samples: Int64[np.ndarray, "num_classes"]
    next_batch: Int64[np.ndarray, ""]
    fingerprint: UInt8[np.ndarray, "32"]


def init_state(
    *, num_layers: int, num_kv_heads: int, num_classes: int, fingerprint: bytes
) -> AmaxState:
    """Makes the state of a run that has observed nothing: the neutral of `merge`."""
    heads = (num_layers, num_kv_heads)
    return AmaxState(
        k_amax=np.zeros(heads, np.float32),
        v_amax=np.zeros(heads, np.float32),
        k_nonfinite=np.zeros(heads, np.int64),
        v_nonfinite=np.zeros(heads, np.int64),
        num_tokens=np.zeros(num_classes, np.int64),
        num_samples=np.zeros(num_classes, np.int64),
        next_batch=np.zeros((), np.int64),
        fingerprint=np.frombuffer(fingerprint, np.uint8).copy(),
    )


def merge(a: AmaxState, b: AmaxState) -> AmaxState:
    """Merges two states of one run: amax by maximum, counts by sum.

    Associative and commutative to the last bit, so neither order nor the number of
    devices and processes shows in the result. The states must not share a batch.

    Raises:
      ValueError: if the states belong to different runs.
    """
    if not np.array_equal(a.fingerprint, b.fingerprint):
        raise ValueError(
            "Expected two states of one calibration run, got fingerprints "
            f"{_hex(a)} and {_hex(b)}."
        )
    return AmaxState(
        k_amax=np.maximum(a.k_amax, b.k_amax),
        v_amax=np.maximum(a.v_amax, b.v_amax),
        k_nonfinite=a.k_nonfinite + b.k_nonfinite,
        v_nonfinite=a.v_nonfinite + b.v_nonfinite,
        num_tokens=a.num_tokens + b.num_tokens,
        num_samples=a.num_samples + b.num_samples,
        next_batch=np.maximum(a.next_batch, b.next_batch),
        fingerprint=a.fingerprint,
    )


def _hex(state: AmaxState) -> str:
    return state.fingerprint.tobytes().hex()[:12]


def make_scales(
    state: AmaxState,
    *,
    granularity: Granularity,
    headroom: float,
    skipped_layers: tuple[int, ...] = (),
) -> ScaleSet:
    """Computes scales from amax by the rule of the online freeze.

    `scale = amax * float32(headroom / 448)`, clamped; a group whose amax is 0 gets
    the provisional scale, which is evidence for nothing: the manifest lists it.

    Args:
      state: what was observed.
      granularity: one scale for a layer's K and one for its V, or one for each head.
      headroom: ratio >= 1 between the largest value covered and the amax.
      skipped_layers: layers that get no scales.

    Raises:
      ScaleError: if no layer is left.
    """
    layers = [i for i in range(len(state.k_amax)) if i not in skipped_layers]
    if not layers:
        raise ScaleError(
            "Expected a layer to make scales for, got all of them skipped."
        )

    def by_group(amax: np.ndarray) -> np.ndarray:
        rows = amax[layers]
        return rows if granularity == "head" else rows.max(axis=1, keepdims=True)

    k_amax, v_amax = by_group(state.k_amax), by_group(state.v_amax)
    k_scale, v_scale = (_scale(amax, headroom) for amax in (k_amax, v_amax))
    by_layer = {layer: (k_scale[row], v_scale[row]) for row, layer in enumerate(layers)}
    scales = ScaleSet.from_scales(by_layer, granularity=granularity)
    return replace(scales, k_amax=k_amax, v_amax=v_amax)


def _scale(amax: np.ndarray, headroom: float) -> np.ndarray:
    # One float32 product with a constant made on the host: as the freeze does it.
    scale = scale_of(amax, scale_per_amax(headroom))
    return np.where(amax > 0, scale, NO_SIGNAL_SCALE)
