"""Pages of cold prefixes in host memory, each with the basis its bytes are at."""

from collections import OrderedDict

from fp8kv_jax.serving.page_pool import PrefixKey
from fp8kv_jax.serving.runner import Runner, SavedPage


class HostPages:
    """Keeps the newest pages that the pool gave up.

    A page is found only while the scales are those it was written at. What left
    inside the window comes back inside it, with the owners of its slots, so that the
    freeze rewrites it too; after the freeze, or at any other scale, it is refused and
    its tokens are computed again.

    Args:
      capacity: pages to keep; 0 for none.
      runner: holds the pool.

    Attributes:
      num_loaded: pages brought back.
      num_refused: look-ups of a page that was there at another scale.
    """

    def __init__(self, capacity: int, runner: Runner) -> None:
        self.capacity = capacity
        self.num_loaded = 0
        self.num_refused = 0
        self._runner = runner
        self._pages: OrderedDict[PrefixKey, tuple[bytes, SavedPage]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: PrefixKey) -> bool:
        if key not in self._pages:
            return False
        basis, _ = self._pages[key]
        if basis != self._runner.basis:
            del self._pages[key]
            self.num_refused += 1
            return False
        return True

    def save(self, page: int, key: PrefixKey) -> None:
        """Reads a page of the pool; the oldest one kept gives way. Waits for it."""
        if not self.capacity:
            return
        self._pages[key] = self._runner.basis, self._runner.save_page(page)
        self._pages.move_to_end(key)
        if len(self._pages) > self.capacity:
            self._pages.popitem(last=False)

    def load(self, key: PrefixKey, page: int) -> None:
        """Writes a page that is there into a page of the pool."""
        _, saved = self._pages[key]
        self._runner.load_page(page, saved)
        self._pages.move_to_end(key)
        self.num_loaded += 1
