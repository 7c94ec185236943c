"""Renders chat templates: jinja2 in a sandbox, with the helpers that models expect."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    named_tokens: Mapping[str, str],
) -> str:
    """Renders a conversation.

    The template comes with the model file, so it runs in jinja2's immutable sandbox.

    Args:
      template: jinja source.
      messages: dicts with a `role` and a `content`.
      add_generation_prompt: asks for the opening of the assistant's turn.
      named_tokens: further variables, such as `bos_token`.

    Raises:
      ValueError: if the template is not valid jinja, or refuses the messages.
    """
    try:
        return _compile(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **named_tokens,
        )
    except (jinja2.TemplateError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"The chat template failed: {reason}.") from None


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    # Both trims are what templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,  # pyrefly: ignore
        strftime_now=_strftime_now,  # pyrefly: ignore
    )
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which a model never saw.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
