"""What goes into an engine and what comes out: requests, outputs, statistics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

type FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends, checked when built.

    Args:
      max_tokens: new tokens of each continuation at most; None for as many as the
        engine's `max_seq_len` leaves.
      temperature: 0 takes the likeliest token; above, tokens are drawn.
      top_p: draws come from the likeliest tokens that together reach this share.
      seed: what draws depend on, together with the index of the continuation and the
        position of the token: never on what else is in the batch. None lets the
        engine choose one.
      n: continuations of the prompt; they share its pages.
      stop: strings that end a continuation; they are not part of its text.
      stop_ids: tokens that end a continuation, beside the engine's `eos_ids`. The
        token is reported, its text is not.
      ignore_eos: goes on past the engine's `eos_ids`.
      logprobs: reports the log-probability of each token and of this many likeliest
        ones, 0 to 20; None for none. They are the model's, before temperature and
        top_p.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"Expected max_tokens to be at least 1, got {self.max_tokens}."
            )
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                "Expected temperature to be a finite number from 0 (greedy) on, "
                f"got {self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Expected top_p to be within (0, 1], got {self.top_p}.")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(
                f"Expected seed to be within 0..{2**32 - 1}, got {self.seed}."
            )
        if self.n < 1:
            raise ValueError(f"Expected n to be at least 1, got {self.n}.")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(
                f"Expected stop to be strings, none of them empty, got {self.stop!r}."
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(
                f"Expected logprobs to be within 0..{MAX_LOGPROBS}, "
                f"got {self.logprobs}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to continue.

    Args:
      prompt: token ids, at least one.
      params: how to continue it.
      salt: requests share pages only with those of the same salt, so that a client
        cannot find out by timing what another one has asked.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("Expected a prompt of at least 1 token, got none.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
      token_id: the token that was chosen.
      logprob: its log-probability.
      top: the likeliest tokens and theirs, likeliest first; as many as asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What one continuation got in one step.

    Attributes:
      request_id: as `Engine.add` returned it.
      index: which continuation, from 0 to n - 1.
      token_ids: its new tokens.
      text: text that is certain now; without a detokenizer, always "". Text that may
        turn out to begin a stop string is held back (`fp8kv_jax/serving/text.py`), so
        the texts of all outputs, joined, are the whole text and never hold one.
      logprobs: of each new token, if asked for.
      finish_reason: "stop" (an end token, a stop token or a stop string), "length" or
        "abort" in the last output of a continuation, else None.
      stop_reason: the stop string or stop token that ended it; None for others.
      num_prompt_tokens: tokens of the prompt.
      num_cached_tokens: those of them that were found in shared pages.
      num_output_tokens: tokens of this continuation so far.
    """

    request_id: int
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Where an engine stands. Counters only grow; nothing here waits for the device.

    Attributes:
      num_waiting: continuations that hold no page yet, or none any more.
      num_running: continuations that hold pages.
      num_pages: pages of the pool.
      num_used_pages: pages that continuations hold.
      num_cached_pages: pages held by nobody that keep a prefix for whoever asks next.
      num_host_pages: pages kept in host memory.
      calibrates: whether there is a layer whose scales are found online.
      tokens_seen: real tokens observed, as of the last step.
      window_tokens: how many freeze the scales.
      frozen: whether the scales are final; True without calibration.
      has_window: whether the staged window still takes memory.
      epoch: counts freezes and resets.
      num_steps: steps run.
      num_prompt_tokens: prompt tokens of the continuations admitted so far; a
        recomputation after a preemption does not count again.
      num_cached_tokens: those of them found in shared pages.
      num_output_tokens: tokens generated.
      num_computed_tokens: tokens that went through the model.
      num_preemptions: continuations that lost their pages and were recomputed.
      num_page_copies: pages copied before a write.
      num_evictions: cached pages given up for new ones.
      num_finished: continuations that ended, aborts among them.
      num_aborted: aborted ones.
    """

    num_waiting: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_cached_pages: int
    num_host_pages: int
    calibrates: bool
    tokens_seen: int
    window_tokens: int
    frozen: bool
    has_window: bool
    epoch: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    num_page_copies: int
    num_evictions: int
    num_finished: int
    num_aborted: int

    @property
    def num_free_pages(self) -> int:
        """Pages that a continuation could take now, cached ones included."""
        return self.num_pages - self.num_used_pages
