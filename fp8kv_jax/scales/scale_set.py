"""Scales of a model's KV cache on the host, checked: the one type that files become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8kv_jax.calibration import Granularity, is_scale


class ScaleError(ValueError):
    """Scales that must not be used; the message names the layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleSet:
    """Scales of the covered layers, one row each, in order.

    Attributes:
      layers: the layers that have scales; all others are skipped.
      granularity: "tensor" (one group) or "head" (one group for each KV head).
      k_scale, v_scale: float32 [layers, groups], multipliers out of FP8.
      k_inv_scale, v_inv_scale: their reciprocals, carried and never recomputed by
        whoever reads them; made by `from_scales` where a source has none.
      k_amax, v_amax: what the scales rest on, in units of the activations; NaN where
        the source does not say.
    """

    layers: tuple[int, ...]
    granularity: Granularity
    k_scale: np.ndarray
    v_scale: np.ndarray
    k_inv_scale: np.ndarray
    v_inv_scale: np.ndarray
    k_amax: np.ndarray
    v_amax: np.ndarray

    @property
    def groups(self) -> int:
        return self.k_scale.shape[1]

    def row(self, layer: int) -> int | None:
        """Row of a layer in the arrays; None if it is skipped."""
        return self.layers.index(layer) if layer in self.layers else None

    @classmethod
    def from_scales(
        cls,
        scales: Mapping[int, tuple[np.ndarray, np.ndarray]],
        *,
        granularity: Granularity,
    ) -> "ScaleSet":
        """Builds a set from `layer -> (k_scale, v_scale)`, each `[groups]`.

        The reciprocals are made here, in float32, once.

        Raises:
          ScaleError: as `check` does.
        """
        layers = tuple(sorted(scales))
        if not layers:
            raise ScaleError("Expected scales for at least one layer, got none.")
        sizes = {np.size(scale) for pair in scales.values() for scale in pair}
        if len(sizes) != 1:
            raise ScaleError(
                "Expected as many scales for K and for V of each of the layers "
                f"{short_list(layers)}, got {sorted(sizes)} of them."
            )
        k_scale, v_scale = (
            np.stack([np.asarray(scales[i][j], np.float32) for i in layers])
            for j in (0, 1)
        )
        unknown = np.full_like(k_scale, np.nan)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverses = np.float32(1) / k_scale, np.float32(1) / v_scale
        result = cls(
            layers=layers,
            granularity=granularity,
            k_scale=k_scale,
            v_scale=v_scale,
            k_inv_scale=inverses[0],
            v_inv_scale=inverses[1],
            k_amax=unknown,
            v_amax=unknown.copy(),
        )
        result.check()
        return result

    def check(
        self, *, num_layers: int | None = None, num_kv_heads: int | None = None
    ) -> None:
        """Refuses scales that are not finite, positive and of the right shape.

        Args:
          num_layers: layers of the model, if known.
          num_kv_heads: KV heads of each layer, if known.

        Raises:
          ScaleError: naming the layers and what is wrong with them.
        """
        if not self.layers:
            raise ScaleError("Expected scales for at least one layer, got none.")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ScaleError(
                "Expected layers in order, each once and from 0 on, got "
                f"{short_list(self.layers)}."
            )
        if num_layers is not None and self.layers[-1] >= num_layers:
            extra = [i for i in self.layers if i >= num_layers]
            raise ScaleError(
                f"Expected scales for layers 0 to {num_layers - 1}, those of the "
                f"model, got some for layers {short_list(extra)}: another model's?"
            )
        self._check_shapes(num_kv_heads)
        for name in ("k_scale", "v_scale", "k_inv_scale", "v_inv_scale"):
            values = getattr(self, name)
            good = is_scale(values)
            if not good.all():
                rows = np.flatnonzero(~good.all(axis=1))
                raise ScaleError(
                    f"Expected {name} to be finite, positive and within "
                    f"[2^-100, 2^100], got {values[~good][0]} and the like in layers "
                    f"{short_list([self.layers[row] for row in rows])}."
                )

    def _check_shapes(self, num_kv_heads: int | None) -> None:
        groups = self.k_scale.shape[1:]
        wanted = (1,) if self.granularity == "tensor" else (num_kv_heads,)
        if num_kv_heads is None and self.granularity == "head":
            wanted = groups
        if groups != wanted:
            raise ScaleError(
                f"Expected {wanted[0]} groups for granularity {self.granularity!r} "
                f"(num_kv_heads={num_kv_heads}), got {groups} in layers "
                f"{short_list(self.layers)}."
            )
        shape = (len(self.layers), *wanted)
        for name in ("v_scale", "k_inv_scale", "v_inv_scale", "k_amax", "v_amax"):
            got = getattr(self, name).shape
            if got != shape:
                raise ScaleError(
                    f"Expected {name} of shape {shape}, got {got}, for layers "
                    f"{short_list(self.layers)}."
                )


def short_list(layers: Sequence[int]) -> str:
    """Lists layers, cut after a dozen."""
    shown = ", ".join(map(str, layers[:12]))
    return shown if len(layers) <= 12 else f"{shown} and {len(layers) - 12} more"
