"""Dataclasses whose fields are checked against their annotations, to and from JSON."""

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fp8kv_jax.scales.scale_set import ScaleError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a value must satisfy beyond its type.

    Attributes:
      pattern: regular expression that a whole string matches.
      minimum: the least number allowed.
      meaning: the same in words, for messages.
    """

    pattern: str | None = None
    minimum: int | None = None
    meaning: str

    def allow(self, value: Any) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, value) is not None
        return self.minimum is None or value >= self.minimum


Sha256 = Annotated[
    str, Limits(pattern="[0-9a-f]{64}", meaning="64 hexadecimal digits of a sha256")
]
ArtifactId = Annotated[
    str, Limits(pattern="[0-9a-f]{16}", meaning="an artifact id, 16 hexadecimal digits")
]
Name = Annotated[str, Limits(pattern=r"[\s\S]+", meaning="a text that is not empty")]
Word = Annotated[
    str, Limits(pattern="[a-z][a-z0-9_]*", meaning="a lower-case word such as amax")
]
UtcTime = Annotated[
    str,
    Limits(
        pattern="[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z",
        meaning="a UTC time such as 2026-01-31T12:00:00Z",
    ),
]
Count = Annotated[int, Limits(minimum=0, meaning="a count, from 0 on")]
Positive = Annotated[int, Limits(minimum=1, meaning="an integer from 1 on")]


class Checked:
    """Base of dataclasses that check and normalise their fields when built.

    Lists become tuples, and plain dicts become the dataclasses they describe.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, hint in field_hints(type(self)).items():
            value = decode(hint, getattr(self, name), f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)


@functools.cache
def field_hints(kind: type) -> dict[str, Any]:
    """Annotations of a dataclass by field, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def decode(hint: Any, value: Any, where: str) -> Any:
    """Checks a value against an annotation and makes it of that type.

    Args:
      hint: a type that `Checked` dataclasses use: str, int, float, bool, Any (for
        JSON), Literal, Annotated with Limits, X | None, tuple[X, ...], dict[str, X]
        or such a dataclass.
      value: as JSON or as Python has it.
      where: name of the field, for messages.

    Raises:
      ScaleError: naming the field.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        inner, limits = arguments
        value = decode(inner, value, where)
        return value if limits.allow(value) else _refuse(where, limits.meaning, value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else decode(arguments[0], value, where)
    if origin is Literal:
        names = " or ".join(map(repr, arguments))
        return value if value in arguments else _refuse(where, names, value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            _refuse(where, "a list", value)
        items = enumerate(value)
        return tuple(decode(arguments[0], x, f"{where}[{i}]") for i, x in items)
    if origin is dict:
        return _decode_dict(arguments[1], value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), value, where)
    return _SCALARS[hint](value, where)


def _decode_dict(hint: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        _refuse(where, "an object with names", value)
    return {key: decode(hint, x, f"{where}[{key!r}]") for key, x in value.items()}


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        _refuse(where, "an object", value)
    hints = field_hints(kind)
    missing = [name for name in hints if name not in value]
    if missing:
        raise ScaleError(f"Expected {where}.{missing[0]}, got no such field.")
    extra = sorted(str(name) for name in value if name not in hints)
    if extra:
        raise ScaleError(f"Expected no field {where}.{shown(extra[0])}, got one.")
    return kind(
        **{
            name: decode(hint, value[name], f"{where}.{name}")
            for name, hint in hints.items()
        }
    )


def _decode_text(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _refuse(where, "a text", value)


def _decode_bool(value: Any, where: str) -> bool:
    return value if isinstance(value, bool) else _refuse(where, "true or false", value)


def _decode_int(value: Any, where: str) -> int:
    good = isinstance(value, int) and not isinstance(value, bool)
    return value if good else _refuse(where, "an integer", value)


def _decode_float(value: Any, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    return _refuse(where, "a finite number", value)


def _decode_json(value: Any, where: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return _refuse(where, "what JSON can hold", value)


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {
    str: _decode_text,
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
    Any: _decode_json,
}


def _refuse(where: str, wanted: str, value: Any) -> typing.NoReturn:
    raise ScaleError(f"Expected {where} to be {wanted}, got {shown(value)}.")


def shown(value: Any) -> str:
    """Spells a value in one short line, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of 4300 digits; a deep nest
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII, finite.

    Raises:
      ValueError: for NaN and Inf.
      TypeError: for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(data: bytes, name: str) -> Any:
    """Reads JSON strictly: UTF-8, no NaN, no name twice in an object.

    Args:
      data: the file's bytes.
      name: the file's name, for messages.

    Raises:
      ScaleError: in one line.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ScaleError(f"Expected {name} to be JSON, got {reason}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object that repeats a name")
    return result


def _refuse_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"the number {name}")
