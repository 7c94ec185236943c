"""Reads the fields of a request's JSON, each checked as it is taken."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fp8kv_jax.serving.http.errors import invalid, unsupported


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a request's body.

    Raises:
      ApiError: if it is not a JSON object of finite numbers and Unicode text.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        # A lone surrogate can be spelled in JSON but not be encoded again.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise invalid(f"Expected a body of JSON, got: {reason}.") from None
    if not isinstance(value, dict):
        raise invalid(f"Expected a JSON object, got {_kind(value)}.")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class Fields:
    """The fields of a request; null counts as absent.

    Each method takes a field off and returns it or the default; `finish` refuses what
    is left.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = {k: v for k, v in values.items() if v is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(f"Expected {name} to be a boolean, got {_kind(value)}.", name)
        return value

    def integer(self, name: str, default: int | None = None) -> Any:
        value = self.take(name, default)
        if value is default:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(
                f"Expected {name} to be an integer, got {_kind(value)}.", name
            )
        if abs(value) >= 2**63:
            raise invalid(f"Expected {name} to fit 64 bits.", name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(f"Expected {name} to be a number, got {_kind(value)}.", name)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise invalid(f"Expected {name} to be finite.", name)
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self.take(name, default)
        if not isinstance(value, str):
            raise invalid(f"Expected {name} to be a string, got {_kind(value)}.", name)
        return value

    def strings(self, name: str, *, at_most: int) -> tuple[str, ...]:
        """A string, or a list of them."""
        value = self.take(name, [])
        values = [value] if isinstance(value, str) else value
        good = isinstance(values, list) and len(values) <= at_most
        if not good or not all(isinstance(x, str) for x in values):
            raise invalid(
                f"Expected {name} to be a string or a list of at most {at_most}.", name
            )
        return tuple(values)

    def integers(self, name: str, *, at_most: int) -> frozenset[int]:
        values = self.take(name, [])
        good = isinstance(values, list) and len(values) <= at_most
        if not good or not all(is_integer(x) for x in values):
            raise invalid(
                f"Expected {name} to be a list of at most {at_most} integers.", name
            )
        return frozenset(values)

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here."""
        for name in names:
            self.take(name)

    def refuse(self, name: str, *neutral: Any) -> None:
        """A field that only has its neutral values here."""
        value = self.take(name)
        if value is not None and value not in neutral:
            raise unsupported(f"This server does not support {name}.", name)

    def finish(self) -> None:
        if self._left:
            name = min(self._left)
            raise invalid(f"Expected fields that are known, got {name[:80]!r}.", name)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "an integer", float: "a number", type(None): "nothing"}
    return names[type(value)]
