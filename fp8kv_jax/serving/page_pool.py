"""Pages with reference counts, and an index of the prefixes that they hold."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from fp8kv_jax.block_table import OutOfPagesError

# Names the tokens of a full page and all before it.
type PrefixKey = bytes


def root_key(salt: str) -> PrefixKey:
    """The key of an empty prefix; other salts share no pages."""
    return hashlib.sha256(salt.encode()).digest()


def next_key(key: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    """The key of a prefix that is one page longer."""
    page = np.asarray(tokens, np.dtype("<i4")).tobytes()
    return hashlib.sha256(key + page).digest()


class PagePool:
    """Who holds which page; pages that nobody holds keep their prefix until needed.

    The index tells nothing about scales: every page in the pool is at the scales of
    the state, since the freeze and `recalibrate` rewrite all of them. After `reset`,
    call `forget_all`.

    Args:
      num_pages: pages of the pool.
      on_evict: called with a page and its key before the page is given to somebody
        else, while it still holds its prefix.

    Attributes:
      num_evictions: how often that was.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        on_evict: Callable[[int, PrefixKey], None] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.num_evictions = 0
        self._on_evict = on_evict
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        # Published pages that nobody holds, the longest unused first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}

    @property
    def num_available(self) -> int:
        """Pages that `take` could give."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_available

    @property
    def num_idle(self) -> int:
        """Pages kept for their prefix alone."""
        return len(self._idle)

    def published(self) -> dict[PrefixKey, int]:
        """The index: the page of each prefix."""
        return dict(self._page_of)

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def take(self) -> int:
        """Gives a page to one holder; what it held before may be read no more.

        Raises:
          OutOfPagesError: if somebody holds each page.
        """
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._evict(page)
        else:
            raise OutOfPagesError(
                f"Expected a page that nobody holds, got none of {self.num_pages}: end "
                "or preempt a sequence, or make the pool larger."
            )
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Adds a holder to a page that is held or published."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Takes a holder off; release the pages of a sequence from its end.

        Pages unused for longest go first: the end of a prefix is of no use without
        its beginning.
        """
        assert self._holders[page] > 0
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._key_of:
            self._idle[page] = None
        else:
            self._free.append(page)

    def publish(self, page: int, key: PrefixKey) -> None:
        """Lets others find a full page; the first page of a prefix is kept."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def withdraw(self, page: int) -> None:
        """Takes a page that is held out of the index, before it is written again."""
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def find(self, key: PrefixKey) -> int | None:
        """The page of a prefix; hold it before anything else is taken."""
        return self._page_of.get(key)

    def forget_all(self) -> None:
        """Empties the index: no page may be found any more."""
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _evict(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        self.num_evictions += 1
        if self._on_evict is not None:
            self._on_evict(page, key)
