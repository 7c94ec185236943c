"""How far the scales of two artifacts lie apart, layer by layer, and a picture of it."""

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8kv_jax.scales.files import write_file
from fp8kv_jax.scales.scale_set import ScaleError, ScaleSet

PICTURES = (".png", ".svg")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerDiff:
    """One layer in two sets of scales.

    Attributes:
      layer: its index.
      k_ratio, v_ratio: scale in B over scale in A, by group; None if only one of the
        two covers the layer. A scale for the layer counts for each of its heads.
      only_in: "a" or "b" if only that one covers the layer.
    """

    layer: int
    k_ratio: np.ndarray | None
    v_ratio: np.ndarray | None
    only_in: str | None = None

    @property
    def farthest(self) -> float:
        """The ratio farthest from 1, on a log scale; 1 for a layer of one set."""
        both = [x for x in (self.k_ratio, self.v_ratio) if x is not None]
        return farthest(np.concatenate(both)) if both else 1.0


def farthest(ratios: np.ndarray) -> float:
    """The ratio farthest from 1: 0.25 is farther than 3."""
    return float(ratios[np.argmax(abs(np.log2(ratios)))])


def diff_scales(a: ScaleSet, b: ScaleSet) -> list[LayerDiff]:
    """Compares two sets of scales, on every layer that either covers.

    Raises:
      ScaleError: if both have scales for each head, of different numbers of heads.
    """
    if a.groups != b.groups and 1 not in (a.groups, b.groups):
        raise ScaleError(
            f"Expected scales of models with one number of KV heads, got {a.groups} "
            f"and {b.groups} groups."
        )
    diffs = []
    for layer in sorted({*a.layers, *b.layers}):
        row_a, row_b = a.row(layer), b.row(layer)
        if row_a is None or row_b is None:
            only_in = "b" if row_a is None else "a"
            diffs.append(
                LayerDiff(layer=layer, k_ratio=None, v_ratio=None, only_in=only_in)
            )
            continue
        k_ratio, v_ratio = (
            y[row_b].astype(np.float64) / x[row_a].astype(np.float64)
            for x, y in ((a.k_scale, b.k_scale), (a.v_scale, b.v_scale))
        )
        diffs.append(LayerDiff(layer=layer, k_ratio=k_ratio, v_ratio=v_ratio))
    return diffs


def moved(diff: LayerDiff, threshold: float) -> bool:
    """Whether a layer changed: covered by one set alone, or by more than a share.

    Args:
      diff: the layer.
      threshold: 0.05 for 5 %, up (x 1.05) or down (/ 1.05).
    """
    if diff.only_in is not None:
        return True
    return abs(math.log2(diff.farthest)) > math.log2(1 + threshold)


def plot_diff(
    diffs: Sequence[LayerDiff],
    path: str | os.PathLike[str],
    *,
    names: tuple[str, str],
) -> None:
    """Draws the ratios of K and of V by layer, a dot for each group, on a log scale.

    Args:
      diffs: what `diff_scales` gave.
      path: a file whose suffix says the format, .png or .svg.
      names: of A and B, for the title.

    Raises:
      ImportError: if matplotlib is not installed.
      ValueError: if the suffix is another.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURES:
        raise ValueError(f"Expected a file that ends in .png or .svg, got {path}.")
    # Not a dependency, and not needed for the numbers. The figure is made without
    # pyplot, which would choose a window system.
    from matplotlib.figure import Figure  # pyrefly: ignore

    width = max(6.0, 1.5 + 0.28 * len(diffs))
    figure = Figure(figsize=(min(width, 40), 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    for axes, name in ((top, "k"), (bottom, "v")):
        _draw(axes, diffs, name)
    bottom.set_xlabel("layer")
    title = f"scales of {names[1]} (B) over those of {names[0]} (A)"
    if any(diff.only_in for diff in diffs):
        title += "\nred: only in A; green: only in B"
    figure.suptitle(title)
    image = io.BytesIO()
    figure.savefig(image, format=suffix[1:], dpi=150)
    write_file(Path(path), image.getvalue())


def _draw(axes, diffs: Sequence[LayerDiff], name: str) -> None:
    from matplotlib.ticker import (  # pyrefly: ignore
        MaxNLocator,
        NullLocator,
        StrMethodFormatter,
    )

    for diff in diffs:
        ratios = getattr(diff, f"{name}_ratio")
        if ratios is None:
            color = "tab:red" if diff.only_in == "a" else "tab:green"
            axes.axvspan(diff.layer - 0.4, diff.layer + 0.4, color=color, alpha=0.25)
        else:
            axes.vlines(diff.layer, 1, farthest(ratios), color="tab:gray", alpha=0.5)
            axes.plot([diff.layer] * len(ratios), ratios, "o", color="tab:blue", ms=4)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    # Powers of two alone would leave ratios near 1 without a tick to read them by.
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", alpha=0.3)
    axes.set_ylabel(f"{name}_scale, B / A")
