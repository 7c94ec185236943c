"""Workloads: prompts and chats as JSON lines, read one at a time.

A line holds an object: `{"prompt": "..."}` (or "text") or `{"messages": [...]}`, and
may say `"class"`, `"language"`, `"expected"` (an answer, or a list of answers any of
which will do) and `"id"`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from fp8kv_jax.scales.corpus import Content

UNKNOWN_LANGUAGE = "unknown"
# Each class and each language is a slice with tables of its own.
MAX_VALUES = 32
_FIELDS = ("prompt", "text", "messages", "class", "language", "expected", "id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One line of a workload."""

    line: int
    name: str
    content: Content
    data_class: str
    language: str
    expected: tuple[str, ...]

    @property
    def prompt(self) -> Content:
        """What a model is to continue: a chat without the answer that ends it."""
        if isinstance(self.content, str):
            return self.content
        ends_in_answer = self.content[-1].get("role") == "assistant"
        return self.content[:-1] if ends_in_answer else self.content


# Token ids of a content; with `answer`, up to where the model's answer begins.
type Encode = Callable[[Content, bool], list[int]]


@dataclass(kw_only=True)
class Tally:
    """What one pass over a workload found, in memory that does not grow with it.

    Attributes:
      lengths: how many samples have 0, 1, ... tokens, after cutting.
      classes, languages: samples and tokens of each, in order of appearance.
    """

    lengths: Int64[np.ndarray, "max_tokens+1"]
    classes: dict[str, list[int]]
    languages: dict[str, list[int]]
    sha256: str = ""
    num_cut: int = 0
    num_with_answer: int = 0

    @property
    def num_samples(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.lengths @ np.arange(len(self.lengths)))

    def percentile(self, share: float) -> int:
        """The least length that this share of the samples does not exceed."""
        below = np.cumsum(self.lengths)
        return int(np.searchsorted(below, share * below[-1]))

    def add(self, sample: Sample, num_tokens: int, *, cut: bool) -> None:
        self.lengths[num_tokens] += 1
        self.num_cut += cut
        self.num_with_answer += bool(sample.expected)
        for known, name, kind in (
            (self.classes, sample.data_class, "classes"),
            (self.languages, sample.language, "languages"),
        ):
            if name not in known and len(known) == MAX_VALUES:
                raise ValueError(
                    f"Expected at most {MAX_VALUES} {kind} in the workload, got "
                    f"{name!r} as one more in line {sample.line}."
                )
            counts = known.setdefault(name, [0, 0])
            counts[0] += 1
            counts[1] += num_tokens


def read_samples(path: Path) -> Iterator[Sample]:
    """Streams the samples of a JSON lines file; blank lines are skipped.

    Raises:
      ValueError: naming the line, if it is not such an object.
    """
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(line, number, f"line {number} of {path}")


def scan(path: Path, encode: Encode, *, max_tokens: int) -> Tally:
    """Reads a workload once, for its digest and what slices it has.

    Args:
      path: the file.
      encode: makes token ids of a content.
      max_tokens: where longer samples are cut.

    Raises:
      ValueError: naming the line that is wrong; or if there is no sample.
    """
    tally = Tally(lengths=np.zeros(max_tokens + 1, np.int64), classes={}, languages={})
    for sample in read_samples(path):
        num_tokens = len(encode_sample(sample, encode, path))
        cut = num_tokens > max_tokens
        tally.add(sample, min(num_tokens, max_tokens), cut=cut)
    if not tally.num_samples:
        raise ValueError(f"Expected a sample in {path}, found none.")
    with _open(path) as file:
        tally.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return tally


def encode_sample(
    sample: Sample, encode: Encode, path: Path, *, answer: bool = False
) -> list[int]:
    """Token ids of a sample, or with `answer` of the prompt that it answers.

    Raises:
      ValueError: naming the line, if it has no token or the template refuses it.
    """
    where = f"line {sample.line} of {path}"
    content = sample.prompt if answer else sample.content
    try:
        ids = encode(content, answer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not ids:
        raise ValueError(f"Expected text in {where}, got none.")
    return ids


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(
            f"Expected a readable file, got {path}: {error.strerror}."
        ) from None


def _parse(line: bytes, number: int, where: str) -> Sample:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"Expected JSON in {where}, got: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"Expected an object in {where}.")
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise ValueError(
            f"Expected the fields {', '.join(_FIELDS)} alone in {where}, got "
            f"{unknown[0]!r}."
        )
    content = _content(value, where)
    default = "text" if isinstance(content, str) else "chat"
    return Sample(
        line=number,
        name=_text(value, "id", f"line {number}", where),
        content=content,
        data_class=_text(value, "class", default, where),
        language=_text(value, "language", UNKNOWN_LANGUAGE, where),
        expected=_expected(value.get("expected", ()), where),
    )


def _content(value: dict[str, Any], where: str) -> Content:
    given = [name for name in ("prompt", "text", "messages") if name in value]
    content = value[given[0]] if len(given) == 1 else None
    if given != ["messages"] and isinstance(content, str) and content.strip():
        return content
    if given == ["messages"] and isinstance(content, list) and _is_chat(content):
        return content
    raise ValueError(
        'Expected either "prompt" (a text) or "messages" (a list of objects with '
        f'"role" and "content", the last of them not alone an answer) in {where}.'
    )


def _is_chat(messages: list[Any]) -> bool:
    sound = all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str)
        for m in messages
    )
    return sound and any(m["role"] != "assistant" for m in messages)


def _text(value: dict[str, Any], name: str, default: str, where: str) -> str:
    text = value.get(name, default)
    if not isinstance(text, str) or not text:
        raise ValueError(f'Expected "{name}" to be a text in {where}, got {text!r}.')
    return text


def _expected(value: Any, where: str) -> tuple[str, ...]:
    answers = (value,) if isinstance(value, str) else value
    if not isinstance(answers, list | tuple) or not all(
        isinstance(answer, str) and answer.strip() for answer in answers
    ):
        raise ValueError(
            f'Expected "expected" to be an answer or a list of answers in {where}, '
            f"got {value!r}."
        )
    return tuple(answers)
