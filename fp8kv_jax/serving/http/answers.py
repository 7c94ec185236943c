"""From what continuations get to the JSON of OpenAI's answers, whole or in events."""

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8kv_jax.serving.http.config import ServedModel
from fp8kv_jax.serving.http.schemas import Asked
from fp8kv_jax.serving.request import Output, TokenLogprobs

# OpenAI's stand-in for minus infinity, which JSON cannot spell.
_LOWEST_LOGPROB = -9999.0


@dataclass(kw_only=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0
    finish_reason: str | None = None
    num_tokens: int = 0
    begun: bool = False


class Answer:
    """The answer to one request, built output by output.

    Args:
      asked: the request.
      model: spells tokens.
    """

    def __init__(self, asked: Asked, model: ServedModel) -> None:
        self._asked = asked
        self._model = model
        kind = "chatcmpl" if asked.chat else "cmpl"
        self._id = f"{kind}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(asked.num_choices)]
        self._prompts = [0] * len(asked.requests)
        self._cached = [0] * len(asked.requests)

    def add(self, prompt: int, output: Output) -> tuple[int, dict[str, Any] | None]:
        """Takes an output of a prompt; returns its choice and logprobs of it alone."""
        index = prompt * self._asked.n + output.index
        choice = self._choices[index]
        logprobs = self._spell(choice, output.logprobs, output.text)
        choice.text.append(output.text)
        choice.finish_reason = output.finish_reason
        choice.num_tokens = output.num_output_tokens
        self._prompts[prompt] = output.num_prompt_tokens
        self._cached[prompt] = max(self._cached[prompt], output.num_cached_tokens)
        if logprobs is not None:
            choice.logprobs.append(logprobs)
        return index, logprobs

    def whole(self) -> dict[str, Any]:
        """The answer, once all has been added."""
        choices = []
        for index, choice in enumerate(self._choices):
            said: dict[str, Any] = {"index": index}
            text = "".join(choice.text)
            if self._asked.chat:
                said["message"] = {
                    "role": "assistant",
                    "content": text,
                    "refusal": None,
                }
            else:
                said["text"] = text
            said["logprobs"] = _joined(choice.logprobs)
            said["finish_reason"] = choice.finish_reason
            choices.append(said)
        return self._frame(choices, usage=self._usage())

    def events(self, prompt: int, output: Output) -> Iterator[dict[str, Any]]:
        """Takes an output of a prompt; returns the events that it makes."""
        index, logprobs = self.add(prompt, output)
        choice = self._choices[index]
        if self._asked.chat and not choice.begun:
            choice.begun = True
            yield self._event(index, {"role": "assistant", "content": ""})
        if output.text or logprobs is not None:
            yield self._event(index, {"content": output.text}, logprobs)
        if output.finish_reason is not None:
            yield self._event(index, {}, None, output.finish_reason)

    def last_event(self) -> dict[str, Any] | None:
        """The event that counts tokens, if it was asked for."""
        if not self._asked.include_usage:
            return None
        return self._frame([], usage=self._usage())

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"index": index}
        if self._asked.chat:
            said["delta"] = delta
        else:
            said["text"] = delta.get("content", "")
        said |= {"logprobs": logprobs, "finish_reason": finish_reason}
        if self._asked.include_usage:
            return self._frame([said], usage=None)
        return self._frame([said])

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "text_completion"
        if self._asked.chat:
            kind = "chat.completion"
            if self._asked.stream:
                kind += ".chunk"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
            **more,
        }

    def _usage(self) -> dict[str, Any]:
        num_new = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": sum(self._prompts),
            "completion_tokens": num_new,
            "total_tokens": sum(self._prompts) + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def _spell(
        self,
        choice: _Choice,
        logprobs: Sequence[TokenLogprobs] | None,
        text: str,
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        if self._asked.chat:
            return {"content": [self._chat_token(x) for x in logprobs], "refusal": None}
        offsets = [choice.offset] * len(logprobs)
        choice.offset += len(text)
        return {
            "tokens": [self._token(x.token_id) for x in logprobs],
            "token_logprobs": [_finite(x.logprob) for x in logprobs],
            "top_logprobs": [
                {self._token(token): _finite(value) for token, value in x.top}
                for x in logprobs
            ],
            "text_offset": offsets,
        }

    def _chat_token(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        def describe(token_id: int, logprob: float) -> dict[str, Any]:
            return {
                "token": self._token(token_id),
                "logprob": _finite(logprob),
                "bytes": list(self._model.token_bytes(token_id)),
            }

        own = describe(logprobs.token_id, logprobs.logprob)
        return own | {"top_logprobs": [describe(*pair) for pair in logprobs.top]}

    def _token(self, token_id: int) -> str:
        return self._model.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB) if math.isfinite(logprob) else _LOWEST_LOGPROB


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Joins the logprobs of a choice's outputs."""
    if not parts:
        return None
    joined: dict[str, Any] = {}
    for part in parts:
        for name, values in part.items():
            joined[name] = values and [*(joined.get(name) or ()), *values]
    return joined
