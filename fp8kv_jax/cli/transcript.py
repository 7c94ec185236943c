"""The text of each sequence as it grows, shown in the order of the prompts."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fp8kv_jax.generation import Token


class Decoder(Protocol):
    """Decodes one text token by token."""

    def push(self, index: int) -> str: ...

    def flush(self) -> str: ...


class Transcript:
    """Collects tokens and text, and writes the text.

    One sequence is written as it comes. Of several, the first unfinished one is
    written as it comes and the others wait, so that texts do not mix.

    Args:
      prompts: the texts that are continued.
      decoders: one for each prompt.
      write: takes text to show.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        decoders: Sequence[Decoder],
        write: Callable[[str], None],
    ) -> None:
        self.prompts = prompts
        self.token_ids: list[list[int]] = [[] for _ in prompts]
        self.texts = [""] * len(prompts)
        self.finish_reasons: list[str | None] = [None] * len(prompts)
        self._decoders = decoders
        self._write = write
        self._shown = 0
        self._write(self._label(0))

    def push(self, token: Token) -> None:
        """Takes a token. The end token itself is not text."""
        index = token.sequence
        self.token_ids[index].append(token.token_id)
        self.finish_reasons[index] = token.finish_reason
        decoder = self._decoders[index]
        text = "" if token.finish_reason == "stop" else decoder.push(token.token_id)
        if token.finish_reason:
            text += decoder.flush()
        self.texts[index] += text
        if index == self._shown:
            self._write(text)
            self._show_next()

    def outputs(self) -> list[dict[str, Any]]:
        """What was generated, as `--json` shows it."""
        return [
            {
                "prompt": prompt,
                "token_ids": self.token_ids[i],
                "text": self.texts[i],
                "finish_reason": self.finish_reasons[i],
            }
            for i, prompt in enumerate(self.prompts)
        ]

    def _show_next(self) -> None:
        while self.finish_reasons[self._shown]:
            self._write("\n")
            if self._shown + 1 == len(self.prompts):
                return
            self._shown += 1
            self._write(f"\n{self._label(self._shown)}{self.texts[self._shown]}")

    def _label(self, index: int) -> str:
        if len(self.prompts) == 1:
            return ""
        title = " ".join(self.prompts[index].split())
        title = title if len(title) <= 50 else f"{title[:49]}\u2026"
        return f"==> {index + 1}/{len(self.prompts)}: {title} <==\n"
