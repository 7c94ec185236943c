"""Text of one continuation, token by token, ended by stop strings.

This is the layer that holds text back: a text that may be the beginning of a stop
string leaves only once it is certain that it is none.
"""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Decodes one text token by token; `models.tokenizer.StreamDecoder` is one."""

    def push(self, index: int) -> str:
        """Takes the next token; returns the text that is complete with it."""
        ...

    def flush(self) -> str:
        """Ends the text; returns what is left of it."""
        ...


class TextStream:
    """Hands out text that is certain to come before any stop string.

    Args:
      detokenizer: of this continuation alone.
      stop: strings that end it.

    Attributes:
      stopped_by: the stop string that came, or None.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain now."""
        return self._release(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Ends the text; returns what was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            # The earliest one; of two that begin together, the one named first.
            at, self.stopped_by = min(found, key=lambda pair: pair[0])
            self._held = ""
            return text[:at]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that begins a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
