"""Draws of samples that do not depend on their order, in bounded memory."""

import hashlib
import heapq
import itertools


class Draw[Item]:
    """Keeps the items whose hashes are smallest, shared out over classes.

    Which are drawn depends on the seed and on their keys alone.

    Args:
      size: items to draw.
      seed: what the draw depends on.
    """

    def __init__(self, size: int, *, seed: int) -> None:
        self._size = size
        self._seed = seed
        # By class a heap of (-hash, key, item), the largest hash on top.
        self._heaps: dict[str, list[tuple[int, str, Item]]] = {}

    def offer(self, item: Item, *, key: str, data_class: str, first: bool = False):
        """Takes an item into account; those with `first` go before all others."""
        if not self._size:
            return
        digest = hashlib.sha256(f"{self._seed} {key}".encode()).digest()
        rank = int.from_bytes(digest[:8]) + (0 if first else 1 << 64)
        heap = self._heaps.setdefault(data_class, [])
        entry = (-rank, key, item)
        if len(heap) < self._size:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)

    def items(self) -> list[Item]:
        """The items drawn: one of each class in turn, until there are enough."""
        by_class = [
            [item for _, _, item in sorted(heap, key=lambda x: x[:2], reverse=True)]
            for _, heap in sorted(self._heaps.items())
        ]
        turns = itertools.zip_longest(*by_class)
        flat = [item for turn in turns for item in turn if item is not None]
        return flat[: self._size]
