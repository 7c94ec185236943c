"""One continuation under way: its tokens, its pages, and how far the cache holds it."""

from dataclasses import dataclass, field
from typing import Self

from fp8kv_jax.serving.page_pool import PrefixKey, next_key
from fp8kv_jax.serving.request import SamplingParams
from fp8kv_jax.serving.text import TextStream


# Compared by identity: each is one continuation.
@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A continuation, known to scheduler and engine.

    Attributes:
      request_id, index: whose it is.
      params: how to continue.
      seed: what its draws depend on, with its index.
      tokens: prompt and new tokens. One that the device has still to choose is
        negative: `~row`, of the newest step's rows.
      num_prompt: tokens of the prompt.
      max_len: length at which it ends.
      parent: the continuation of the same prompt whose pages it may take over.
      pages: pages it holds, in order.
      num_computed: tokens whose K and V stand in its pages.
      num_cached: tokens of the prompt that were found there, None before admission.
      keys: of its full pages so far, after the root's.
      num_published: full pages that were put into the index or found there.
      text: its text, if the engine has a detokenizer.
    """

    request_id: int
    index: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt: int
    max_len: int
    keys: list[PrefixKey]
    parent: Self | None = None
    text: TextStream | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    num_published: int = 0

    @property
    def num_left(self) -> int:
        """Tokens that still have to go through the model; 1 while it decodes."""
        # The last token of all never does.
        return min(len(self.tokens), self.max_len - 1) - self.num_computed

    @property
    def num_known(self) -> int:
        """Tokens whose ids have been read from the device; the others follow."""
        num_known = len(self.tokens)
        while self.tokens[num_known - 1] < 0:
            num_known -= 1
        return num_known

    @property
    def num_new(self) -> int:
        return self.num_known - self.num_prompt

    def key_of_page(self, page_index: int, page_size: int) -> PrefixKey:
        """Names the first pages of its tokens, `page_index` the last of them."""
        while len(self.keys) < page_index + 2:
            start = (len(self.keys) - 1) * page_size
            page = self.tokens[start : start + page_size]
            self.keys.append(next_key(self.keys[-1], page))
        return self.keys[page_index + 1]
