"""What a sweep varies: windows, orders of traffic, and how scales follow from them."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8kv_jax.calibration import CalibrationConfig, Granularity
from fp8kv_jax.drift.sweep_statistics import NUMBER_FORMATS

MAX_WINDOW = 4096
# In an order: all classes that it does not name, texts mixed.
REST = "*"
AMAX = "amax"

type Order = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the grid; see `Grid`."""

    order: Order
    seed: int | None
    chunk: int
    window: int
    granularity: Granularity
    headroom: float
    rule: str
    number_format: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a sweep varies, checked when built; every combination is a setting.

    Args:
      orders: classes of text in the order of their traffic; `*` stands for all the
        others, texts mixed. Texts of one class come as recorded.
      seeds: each shuffles the texts inside each class and inside `*`; None keeps the
        order of the file.
      chunks: tokens of the largest batch.
      windows: 1 to 4,096 tokens.
      granularities: "tensor" or "head".
      headrooms: from 1 on.
      rules: "amax", or "p99.9" for the smallest magnitude that this percentage of
        the window's nonzero values of a group do not exceed.
      number_formats: of `NUMBER_FORMATS`.
    """

    orders: tuple[Order, ...]
    seeds: tuple[int | None, ...] = (None,)
    chunks: tuple[int, ...] = (64,)
    windows: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)
    granularities: tuple[Granularity, ...] = ("tensor",)
    headrooms: tuple[float, ...] = (2.0,)
    rules: tuple[str, ...] = (AMAX,)
    number_formats: tuple[str, ...] = ("fp8_e4m3",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name):
                raise ValueError(f"Expected at least one of {field.name}, got none.")
        wrong = [w for w in self.windows if not 1 <= w <= MAX_WINDOW]
        if wrong:
            raise ValueError(
                f"Expected windows of 1 to {MAX_WINDOW} tokens, got {wrong[0]}."
            )
        if min(self.chunks) < 1:
            raise ValueError(
                f"Expected chunks of at least 1 token, got {min(self.chunks)}."
            )
        unknown = [name for name in self.number_formats if name not in NUMBER_FORMATS]
        if unknown:
            raise ValueError(
                f"Expected formats among {', '.join(NUMBER_FORMATS)}, got {unknown[0]!r}."
            )
        for rule in self.rules:
            percentage_of(rule)
        # Granularity and headroom are held to what the real calibration takes.
        configs = [
            CalibrationConfig(granularity=g, headroom=h)
            for g in self.granularities
            for h in self.headrooms
        ]
        object.__setattr__(
            self, "headrooms", tuple(dict.fromkeys(c.headroom for c in configs))
        )

    def settings(self) -> Iterator[Setting]:
        """All combinations; windows vary fastest, then orders and seeds."""
        for (
            number_format,
            rule,
            granularity,
            headroom,
            chunk,
            order,
            seed,
            window,
        ) in itertools.product(
            self.number_formats,
            self.rules,
            self.granularities,
            self.headrooms,
            self.chunks,
            self.orders,
            self.seeds,
            self.windows,
        ):
            yield Setting(
                order=order,
                seed=seed,
                chunk=chunk,
                window=window,
                granularity=granularity,
                headroom=headroom,
                rule=rule,
                number_format=number_format,
            )


def percentage_of(rule: str) -> float | None:
    """Reads a rule: None for "amax", 99.9 for "p99.9".

    Raises:
      ValueError: if it is neither.
    """
    if rule == AMAX:
        return None
    try:
        percentage = float(rule.removeprefix("p")) if rule.startswith("p") else 0.0
    except ValueError:
        percentage = 0.0
    if not 0 < percentage <= 100:
        raise ValueError(
            "Expected a rule to be amax, or p and a percentage such as p99.99, got "
            f"{rule!r}."
        )
    return percentage


def resolve_orders(
    orders: Sequence[Order], classes: Sequence[str], held_out: Sequence[str]
) -> tuple[Order, ...]:
    """Checks orders against the classes there are; makes them up if there are none.

    Args:
      orders: may be empty: each class not held out goes first once, then the rest.
      classes: those of the trace.
      held_out: classes that `*` leaves out.

    Raises:
      ValueError: naming the classes, if an order names another or one twice.
    """
    known = f"the classes of the trace ({', '.join(classes)})"
    for name in held_out:
        if name not in classes:
            raise ValueError(f"Expected --held-out among {known}, got {name!r}.")
    for order in orders:
        for name in order:
            if name != REST and name not in classes:
                raise ValueError(f"Expected --order to name {known}, got {name!r}.")
            if name in held_out:
                raise ValueError(
                    f"Expected {name!r} in --order or in --held-out, got it in both."
                )
        if len(set(order)) < len(order):
            raise ValueError(
                f"Expected each class once in --order, got {','.join(order)}."
            )
    left = [name for name in classes if name not in held_out]
    if not left:
        raise ValueError("Expected a class that --held-out does not name, got none.")
    return tuple(orders) or tuple((name, REST) for name in left)
