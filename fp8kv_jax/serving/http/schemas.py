"""From the JSON of a request to prompts and parameters of the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8kv_jax.serving.http.config import ServedModel
from fp8kv_jax.serving.http.errors import ApiError, invalid, unsupported
from fp8kv_jax.serving.http.fields import Fields, is_integer
from fp8kv_jax.serving.request import Request, SamplingParams

_MAX_STOPS = 16
_ROLES = {"system": "system", "developer": "system"}
_ROLES |= {"user": "user", "assistant": "assistant"}
_CHANGES_NOTHING = ("user", "metadata", "store", "service_tier", "safety_identifier")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, checked.

    Attributes:
      chat: whether it is a chat completion.
      requests: one for each prompt.
      stream: whether the answer comes in events.
      include_usage: whether the last event counts tokens.
    """

    chat: bool
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool

    @property
    def n(self) -> int:
        """Continuations of each prompt."""
        return self.requests[0].params.n

    @property
    def num_choices(self) -> int:
        return self.n * len(self.requests)


def parse_completion(
    values: Mapping[str, Any], model: ServedModel, *, max_choices: int
) -> Asked:
    """Reads a request of `/v1/completions`.

    Raises:
      ApiError: 400 if it is wrong, 404 for another model, 422 for what is not served.
    """
    fields = Fields(values)
    _check_model(fields, model)
    prompt = fields.take("prompt")
    n = fields.integer("n", 1)
    fields.refuse("best_of", n)
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    logprobs = fields.integer("logprobs")
    max_tokens = fields.integer("max_tokens", 16)
    texts = _prompts(prompt)
    _check_choices(n * len(texts), max_choices)
    return _finish(
        fields,
        [_token_ids(text, model) for text in texts],
        chat=False,
        n=n,
        logprobs=logprobs,
        max_tokens=max_tokens,
    )


def parse_chat(
    values: Mapping[str, Any], model: ServedModel, *, max_choices: int
) -> Asked:
    """Reads a request of `/v1/chat/completions`; raises as `parse_completion`."""
    fields = Fields(values)
    _check_model(fields, model)
    n = fields.integer("n", 1)
    _check_choices(n, max_choices)
    logprobs = 0 if fields.boolean("logprobs") else None
    top = fields.integer("top_logprobs")
    if top is not None:
        if logprobs is None:
            raise invalid("Expected logprobs to be true with top_logprobs.", "logprobs")
        logprobs = top
    max_tokens = fields.integer("max_tokens")
    max_tokens = fields.integer("max_completion_tokens", max_tokens)
    fields.refuse("tools", [])
    fields.refuse("tool_choice", "none", "auto")
    fields.refuse("functions", [])
    fields.refuse("function_call", "none", "auto")
    fields.refuse("modalities", ["text"])
    fields.refuse("audio")
    fields.refuse("response_format", {"type": "text"})
    fields.ignore("parallel_tool_calls", "reasoning_effort", "verbosity")
    messages = _messages(fields.take("messages"))
    if model.render_chat is None:
        raise unsupported(
            "This model has no chat template; use /v1/completions.", "messages"
        )
    try:
        prompt = model.render_chat(messages)
    except ValueError as error:
        raise invalid(str(error), "messages") from None
    return _finish(
        fields,
        [_token_ids(prompt, model)],
        chat=True,
        n=n,
        logprobs=logprobs,
        max_tokens=max_tokens,
    )


def _check_model(fields: Fields, model: ServedModel) -> None:
    name = fields.string("model")
    if name != model.name:
        raise ApiError(
            404,
            f"Expected the model {model.name!r}, got {name[:80]!r}.",
            code="model_not_found",
            param="model",
        )


def _check_choices(num_choices: int, max_choices: int) -> None:
    if num_choices > max_choices:
        raise invalid(
            f"Expected at most {max_choices} choices (n times prompts), "
            f"got {num_choices}.",
            "n",
        )


def _finish(
    fields: Fields,
    prompts: list[Sequence[int]],
    *,
    chat: bool,
    n: int,
    logprobs: int | None,
    max_tokens: int | None,
) -> Asked:
    """Reads what both kinds share, and refuses what is left."""
    seed = fields.integer("seed")
    stream = fields.boolean("stream")
    include_usage = _include_usage(fields, stream)
    salt = fields.string("cache_salt", "")
    for name in ("presence_penalty", "frequency_penalty"):
        fields.refuse(name, 0)
    fields.refuse("logit_bias", {})
    fields.ignore(*_CHANGES_NOTHING)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            # Clients may give any integer; draws depend on 32 bits.
            seed=None if seed is None else seed % 2**32,
            n=n,
            stop=fields.strings("stop", at_most=_MAX_STOPS),
            stop_ids=fields.integers("stop_token_ids", at_most=_MAX_STOPS),
            ignore_eos=fields.boolean("ignore_eos"),
            logprobs=logprobs,
        )
        requests = [Request(prompt=p, params=params, salt=salt) for p in prompts]
    except ValueError as error:
        raise invalid(str(error)) from None
    fields.finish()
    return Asked(
        chat=chat,
        requests=tuple(requests),
        stream=stream,
        include_usage=include_usage,
    )


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        raise invalid(
            "Expected stream_options to be an object, together with stream.",
            "stream_options",
        )
    options = Fields(options)
    options.ignore("include_obfuscation")
    include_usage = options.boolean("include_usage")
    options.finish()
    return include_usage


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(is_integer(x) for x in prompt):
            return [prompt]
        lists = [isinstance(x, list) and all(map(is_integer, x)) for x in prompt]
        if all(isinstance(x, str) for x in prompt) or all(lists):
            return prompt
    raise invalid(
        "Expected prompt to be a text, token ids, or a list of either.", "prompt"
    )


def _token_ids(prompt: str | list[int], model: ServedModel) -> Sequence[int]:
    if isinstance(prompt, str):
        return model.encode(prompt)
    if prompt and not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
        raise invalid(
            f"Expected token ids from 0 to {model.vocab_size - 1} in prompt.", "prompt"
        )
    return prompt


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise invalid("Expected messages to be a list of at least one.", "messages")
    return [_message(message, at) for at, message in enumerate(messages)]


def _message(message: Any, at: int) -> dict[str, str]:
    where = f"messages[{at}]"
    if not isinstance(message, dict):
        raise invalid(f"Expected {where} to be an object.", where)
    role = message.get("role")
    if role in ("tool", "function"):
        raise unsupported(f"This server does not support the role {role!r}.", where)
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"Expected role of {where} to be one of {[*_ROLES]}.", where)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise invalid(f"Expected content of {where} to be a text.", where)
    return {"role": _ROLES[role], "content": content}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"Expected parts of {where} to be objects with a type.", where)
    if part["type"] != "text":
        raise unsupported(
            f"This server does not support parts of type {part['type'][:40]!r}.", where
        )
    if not isinstance(part.get("text"), str):
        raise invalid(f"Expected text of {where} to be a text.", where)
    return part["text"]
