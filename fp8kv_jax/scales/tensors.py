"""Scales as named tensors, `layers.3.k_scale`, and back: what files and dicts hold."""

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fp8kv_jax.calibration import Granularity
from fp8kv_jax.scales.fields import shown
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet, short_list

KINDS = ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale", "k_amax", "v_amax")
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.([a-z_]+)")
# Beyond the rounding of any device's reciprocal (2 ulp), far below any other error.
_INVERSE_TOLERANCE = 2.0**-20


def to_tensors(scale_set: ScaleSet) -> dict[str, np.ndarray]:
    """Names the tensors of each layer, float32 `[groups]` each; a pytree to save."""
    return {
        f"layers.{layer}.{kind}": np.ascontiguousarray(getattr(scale_set, kind)[row])
        for row, layer in enumerate(scale_set.layers)
        for kind in KINDS
    }


def scale_set_from_dict(
    tensors: Mapping[str, Any], *, granularity: Granularity, complete: bool = False
) -> ScaleSet:
    """Builds scales from named tensors, the inverse of `to_tensors`.

    Args:
      tensors: by name, `layers.3.k_scale` and so on. A value is a number or an array,
        float32 or another type that converts; one of one element may have any number
        of axes, one of a scale for each head is `(H,)` or `(H, 1, 1)`. Reciprocals
        and amax may be absent; reciprocals are made then, and an amax is unknown.
      granularity: "tensor" or "head".
      complete: whether nothing may be absent, as in our own files.

    Raises:
      ScaleError: naming the layers: a name is unknown or lacks its partner, a value
        is no number or has another shape, a scale is zero, negative or not finite,
        or a reciprocal belongs to another scale.

    Warns:
      UserWarning: if every scale is exactly 1.0.
    """
    by_kind = _sort(tensors)
    layers = tuple(sorted(by_kind["k_scale"].keys() | by_kind["v_scale"].keys()))
    _check_partners(by_kind, layers, complete=complete)
    arrays: dict[str, Any] = _stack(by_kind, layers)
    scales = {
        layer: (arrays["k_scale"][row], arrays["v_scale"][row])
        for row, layer in enumerate(layers)
    }
    # Checks the scales, and makes what a source may lack.
    made = ScaleSet.from_scales(scales, granularity=granularity)
    result = dataclasses.replace(made, **arrays)
    result.check()
    _check_inverses(result)
    _check_amax(result)
    warn_if_all_ones(result)
    return result


def warn_if_all_ones(scale_set: ScaleSet) -> None:
    """Warns of scales that look like nobody calibrated them."""
    if (scale_set.k_scale == 1).all() and (scale_set.v_scale == 1).all():
        warnings.warn(
            "Every scale is exactly 1.0: likely an export that never calibrated, or "
            "that floors scales at 1. Values beyond +-448 will be clipped.",
            UserWarning,
            stacklevel=3,
        )


type _ByKind = dict[str, dict[int, np.ndarray]]


def _sort(tensors: Mapping[Any, Any]) -> _ByKind:
    """Sorts tensors by what they are and by layer, as flat float32 arrays."""
    by_kind: _ByKind = {kind: {} for kind in KINDS}
    unknown, no_numbers, too_wide = [], [], []
    for name, value in tensors.items():
        match = _NAME.fullmatch(str(name))
        if match is None or match[2] not in by_kind:
            unknown.append(str(name))
            continue
        layer = int(match[1])
        array = _as_float32(value)
        if array is None:
            no_numbers.append((match[2], layer))
        elif not 0 < array.size == max(array.shape, default=1):
            too_wide.append((match[2], layer))
        else:
            by_kind[match[2]][layer] = array.reshape(-1)
    if unknown:
        raise ScaleError(
            "Expected names such as layers.0.k_scale, of k and v, each with scale, "
            f"inv_scale and amax, got {len(unknown)} others: "
            f"{', '.join(map(shown, sorted(unknown)[:3]))}."
        )
    _refuse_tensors(no_numbers, "to hold numbers")
    _refuse_tensors(too_wide, "to be one number, or one for each KV head,")
    return by_kind


def _as_float32(value: Any) -> np.ndarray | None:
    """Converts a number or an array of them; None of anything else."""
    if isinstance(value, str | bytes | bool):
        return None
    try:
        array = np.asarray(float(value) if isinstance(value, int) else value)
    except (ValueError, TypeError, OverflowError):
        return None
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        return None
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(np.float32)


def _refuse_tensors(found: Sequence[tuple[str, int]], wanted: str) -> None:
    if found:
        kind, _ = found[0]
        layers = sorted(layer for name, layer in found if name == kind)
        raise ScaleError(
            f"Expected {kind} {wanted} in every layer, got something else in layers "
            f"{short_list(layers)}."
        )


def _check_partners(
    by_kind: _ByKind, layers: tuple[int, ...], *, complete: bool
) -> None:
    """Refuses a tensor that some layers have and others lack."""
    if not layers:
        raise ScaleError("Expected scales for at least one layer, got none.")
    for kind, found in by_kind.items():
        required = complete or kind in ("k_scale", "v_scale")
        missing = [layer for layer in layers if layer not in found]
        if missing and (found or required):
            raise ScaleError(
                f"Expected {kind} for each layer that has a scale, got none for layers "
                f"{short_list(missing)}."
            )
        extra = sorted(found.keys() - set(layers))
        if extra:
            raise ScaleError(
                f"Expected {kind} only beside scales, got it alone for layers "
                f"{short_list(extra)}."
            )


def _stack(by_kind: _ByKind, layers: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Stacks the tensors of each kind to `[layers, groups]`."""
    arrays = {}
    for kind, found in by_kind.items():
        if not found:
            continue
        sizes = [found[layer].size for layer in layers]
        most = max(set(sizes), key=sizes.count)
        odd = [layer for layer, n in zip(layers, sizes, strict=True) if n != most]
        if odd:
            raise ScaleError(
                f"Expected {kind} of {most} groups in every layer, got another number "
                f"in layers {short_list(odd)}."
            )
        arrays[kind] = np.stack([found[layer] for layer in layers])
    return arrays


def _check_inverses(scale_set: ScaleSet) -> None:
    for name in "kv":
        scale = getattr(scale_set, f"{name}_scale").astype(np.float64)
        product = scale * getattr(scale_set, f"{name}_inv_scale")
        _refuse_rows(
            scale_set,
            abs(product - 1) > _INVERSE_TOLERANCE,
            f"Expected {name}_inv_scale to be the reciprocal of {name}_scale",
        )


def _check_amax(scale_set: ScaleSet) -> None:
    for name in ("k_amax", "v_amax"):
        amax = getattr(scale_set, name)
        _refuse_rows(
            scale_set,
            np.isinf(amax) | (amax < 0),
            f"Expected {name} to be finite and not negative, or NaN where unknown",
        )


def _refuse_rows(scale_set: ScaleSet, wrong: np.ndarray, expected: str) -> None:
    if wrong.any():
        layers = [scale_set.layers[row] for row in np.flatnonzero(wrong.any(axis=1))]
        raise ScaleError(f"{expected}, but it is not in layers {short_list(layers)}.")
