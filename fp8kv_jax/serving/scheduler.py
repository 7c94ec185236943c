"""Who goes into the next step: decoding first, then chunks of prompts, under a budget."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fp8kv_jax.serving.page_pool import PagePool, PrefixKey
from fp8kv_jax.serving.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens `start` to `stop` of a sequence: a row of the step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence's next token follows from this row."""
        return self.stop == len(self.sequence.tokens)


@dataclass(kw_only=True, slots=True)
class Plan:
    """What one step does.

    Attributes:
      decode: rows of one token.
      prefill: rows of up to a chunk of tokens.
      page_copies: (source, destination) pages to copy before.
      num_tokens: tokens of all rows.
    """

    decode: list[Chunk] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def chunks(self) -> Iterator[Chunk]:
        yield from self.decode
        yield from self.prefill


class OutsidePages(Protocol):
    """Pages of prefixes that are kept outside the pool."""

    def __contains__(self, key: PrefixKey) -> bool: ...

    def load(self, key: PrefixKey, page: int) -> None:
        """Brings a page that is there back into a page of the pool."""
        ...


class Scheduler:
    """Queue, running sequences and their pages.

    Oldest first. A sequence is admitted when the pool has pages for all tokens that
    are known of it, and takes them at once, so that only decoding ever needs more.
    When it does and there is none, the newest running sequence gives up its pages and
    is recomputed later; the newest itself sits the step out. The oldest can take from
    all others, and one alone fits (`Engine.add` sees to it): somebody always runs.

    Args:
      pool: the pages.
      page_size: tokens a page holds.
      max_num_seqs: sequences that run at a time.
      max_tokens_per_step: real tokens of a step at most, more than `max_num_seqs`.
      chunk: tokens of a prefill row at most.
      max_prefill_rows: prefill rows of a step at most.
      prefix_sharing: whether pages are found by their tokens.
      outside: where to look for pages that are not in the pool.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_num_seqs: int,
        max_tokens_per_step: int,
        chunk: int,
        max_prefill_rows: int,
        prefix_sharing: bool = True,
        outside: OutsidePages | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.chunk = chunk
        self.max_prefill_rows = max_prefill_rows
        self.prefix_sharing = prefix_sharing
        self.waiting: deque[Sequence] = deque()
        # A dict for its order and its quick look-up.
        self.running: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._outside = outside
        # Sources of copies: nobody may take them before the step has run.
        self._copied_from: list[int] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its pages are free at once."""
        if sequence in self.running:
            del self.running[sequence]
            self._publish(sequence)
            self._release_pages(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self) -> Plan:
        """Chooses the next step's rows and gives them their pages."""
        plan = Plan()
        preempted_before = self.num_preemptions
        for sequence in list(self.running):
            # It may have been preempted for one before it.
            if sequence.num_left == 1 and sequence in self.running:
                self._plan_decode(plan, sequence)
        for sequence in self.running:
            if sequence.num_left > 1:
                self._plan_prefill(plan, sequence)
        # Who has just lost its pages would take back what is left of them.
        if self.num_preemptions == preempted_before:
            self._admit(plan)
        return plan

    def advance(self, plan: Plan) -> None:
        """Notes that a step is under way: its tokens stand in their pages.

        Whatever reads these pages is a later step.
        """
        for chunk in plan.chunks():
            chunk.sequence.num_computed = chunk.stop
            self._publish(chunk.sequence)
        for page in self._copied_from:
            self.pool.release(page)
        self._copied_from.clear()

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages; it is the next to be admitted again."""
        del self.running[sequence]
        self._release_pages(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _publish(self, sequence: Sequence) -> None:
        """Lets others find its full pages, as soon as their tokens are known."""
        if not self.prefix_sharing:
            return
        full = min(sequence.num_computed, sequence.num_known) // self.page_size
        for index in range(sequence.num_published, full):
            key = sequence.key_of_page(index, self.page_size)
            self.pool.publish(sequence.pages[index], key)
        sequence.num_published = max(sequence.num_published, full)

    def _release_pages(self, sequence: Sequence) -> None:
        for page in reversed(sequence.pages):
            self.pool.release(page)
        sequence.pages = []
        sequence.num_computed = sequence.num_published = 0

    def _plan_decode(self, plan: Plan, sequence: Sequence) -> None:
        if self._make_room(plan, sequence):
            start = sequence.num_computed
            plan.decode.append(Chunk(sequence=sequence, start=start, stop=start + 1))
            plan.num_tokens += 1

    def _plan_prefill(self, plan: Plan, sequence: Sequence) -> None:
        start = sequence.num_computed
        stop = start + self._num_tokens_left(plan, sequence)
        for at in range(start, stop, self.chunk):
            end = min(at + self.chunk, stop)
            plan.prefill.append(Chunk(sequence=sequence, start=at, stop=end))
        plan.num_tokens += stop - start

    def _num_tokens_left(self, plan: Plan, sequence: Sequence) -> int:
        """Tokens of a sequence that budget and rows leave room for."""
        budget = self.max_tokens_per_step - plan.num_tokens
        if sequence.num_left == 1:
            return min(1, budget)
        rows = self.max_prefill_rows - len(plan.prefill)
        return min(sequence.num_left, rows * self.chunk, budget)

    def _admit(self, plan: Plan) -> None:
        """Starts waiting sequences in order, as long as all of one's tokens fit."""
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                return
            parent = sequence.parent
            if parent in self.running and parent.num_computed < parent.num_prompt:
                continue  # the same prompt is being computed: wait for its pages
            self._share_pages(sequence)
            fits = self._num_missing(sequence) <= self.pool.num_available
            if not fits or self._num_tokens_left(plan, sequence) == 0:
                self._release_pages(sequence)
                return
            self.waiting.remove(sequence)
            self.running[sequence] = None
            self._count_admission(sequence)
            if sequence.num_left == 1:
                self._plan_decode(plan, sequence)
            else:
                self._make_room(plan, sequence)
                self._plan_prefill(plan, sequence)

    def _count_admission(self, sequence: Sequence) -> None:
        """Notes what was found of a prompt, once: not after a preemption again."""
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.num_prompt_tokens += sequence.num_prompt
            self.num_cached_tokens += sequence.num_cached

    def _share_pages(self, sequence: Sequence) -> None:
        """Takes pages that hold its first tokens; at least one token is left to run."""
        parent = sequence.parent
        if parent in self.running and len(sequence.tokens) == sequence.num_prompt:
            num_pages = -(-sequence.num_prompt // self.page_size)
            for page in parent.pages[:num_pages]:
                self.pool.hold(page)
                sequence.pages.append(page)
            sequence.num_computed = sequence.num_prompt - 1
        elif self.prefix_sharing:
            for index in range((len(sequence.tokens) - 1) // self.page_size):
                page = self._find(sequence.key_of_page(index, self.page_size))
                if page is None:
                    break
                sequence.pages.append(page)
            sequence.num_computed = len(sequence.pages) * self.page_size
        sequence.num_published = sequence.num_computed // self.page_size

    def _find(self, key: PrefixKey) -> int | None:
        """Holds the page of a prefix, brought back from outside if need be."""
        page = self.pool.find(key)
        if page is not None:
            self.pool.hold(page)
        elif self._outside is not None and key in self._outside:
            page = self._bring_back(key, self._outside)
        return page

    def _bring_back(self, key: PrefixKey, outside: OutsidePages) -> int | None:
        if not self.pool.num_available:
            return None
        page = self.pool.take()
        if key not in outside:  # it gave way to the page that had to leave for it
            self.pool.release(page)
            return None
        outside.load(key, page)
        self.pool.publish(page, key)
        return page

    def _make_room(self, plan: Plan, sequence: Sequence) -> bool:
        """Gives a sequence pages of its own for all its tokens, if it can."""
        while self._num_missing(sequence) > self.pool.num_available:
            newest = next(reversed(self.running))
            if newest is sequence:
                return False
            self.preempt(newest)
        self._own_first_page(plan, sequence)
        for _ in range(self._num_missing(sequence)):
            sequence.pages.append(self.pool.take())
        return True

    def _num_missing(self, sequence: Sequence) -> int:
        """Pages to take: those it has not, and a copy of a shared one it writes to."""
        needed = -(-len(sequence.tokens) // self.page_size)
        first = sequence.num_computed // self.page_size
        pages = sequence.pages
        shared = first < len(pages) and self.pool.num_holders(pages[first]) > 1
        return needed - len(pages) + shared

    def _own_first_page(self, plan: Plan, sequence: Sequence) -> None:
        """Copies the page that is written first, if others hold it too."""
        first = sequence.num_computed // self.page_size
        if first >= len(sequence.pages):
            return
        page = sequence.pages[first]
        if self.pool.num_holders(page) == 1:
            self.pool.withdraw(page)
        else:
            own = self.pool.take()
            plan.page_copies.append((page, own))
            self._copied_from.append(page)
            sequence.pages[first] = own
