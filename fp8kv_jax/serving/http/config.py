"""What a server serves, and what it allows its clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as clients see it.

    Args:
      name: what requests call it.
      vocab_size: token ids of a prompt are below it.
      encode: makes token ids of a text.
      token_bytes: spells a token.
      render_chat: makes a prompt of messages with `role` and `content`; None if the
        model has no chat template. It may raise ValueError at messages it refuses.
    """

    name: str
    vocab_size: int
    encode: Callable[[str], Sequence[int]]
    token_bytes: Callable[[int], bytes]
    render_chat: Callable[[list[Mapping[str, Any]]], str] | None = None


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits of a server, checked when built.

    Args:
      max_open: continuations that wait or run at a time; more are refused with 429.
      max_choices: continuations that one request may ask for, over all its prompts.
      max_body_bytes: size of a request's body; larger ones are refused with 413.
      header_timeout: seconds within which a client sends a request's headers.
      body_timeout: seconds within which it sends the body.
      request_timeout: seconds that a request may take, its reading included.
      ready_when: what `/ready` waits for: "accepting" (the server answers requests,
        which it does inside the window too) or "frozen" (the scales are final).
      api_key: what clients must give as bearer; None for no check.
    """

    max_open: int = 256
    max_choices: int = 64
    max_body_bytes: int = 2**20
    header_timeout: float = 10.0
    body_timeout: float = 10.0
    request_timeout: float = 600.0
    ready_when: Literal["accepting", "frozen"] = "accepting"
    api_key: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_open", "max_choices", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Expected {name} to be at least 1, got {getattr(self, name)}."
                )
        for name in ("header_timeout", "body_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"Expected {name} to be more than 0, got {getattr(self, name)}."
                )
        if self.api_key is not None and not self.api_key:
            raise ValueError("Expected an api_key that is not empty.")
