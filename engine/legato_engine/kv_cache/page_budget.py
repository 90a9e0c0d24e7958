"""How many pages a sequence needs, and how many are available."""

from __future__ import annotations

from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.radix_tree import Match, RadixTree
from legato_engine.sequence import Sequence


class PageBudget:
    """The pages available to sequences: free ones, and idle ones that the tree would evict."""

    def __init__(self, pool: PagePool, tree: RadixTree, page_size: int) -> None:
        self._pool = pool
        self._tree = tree
        self._page_size = page_size

    @property
    def num_available(self) -> int:
        """Free and idle pages."""
        return self._pool.num_free + self._tree.idle_pages

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` of the available pages, evicting idle ones as needed."""
        self._tree.evict_until_free(count)
        return self._pool.allocate(count)

    def pages_for(self, length: int) -> int:
        """Return the number of pages that hold `length` positions."""
        return -(-length // self._page_size)

    def first_pages(self, sequence: Sequence) -> int:
        """Return the pages of an admission: for the known tokens and the next one."""
        return self.pages_for(min(sequence.length + 1, sequence.max_length))

    def missing_pages(self, sequence: Sequence, match: Match | None) -> int:
        """Return the pages to allocate: private ones, and an image prefix's that is not cached."""
        first = self.first_pages(sequence)
        if match is not None:
            return first - match.node.length // self._page_size
        if sequence.prefix_key is None:
            return first
        image = sequence.image_prefix_length
        return first - image // self._page_size + self.pages_for(image)

    def fits(self, sequence: Sequence, match: Match | None, available: int) -> bool:
        """Whether `available` pages suffice, less the idle ones that `match` would acquire."""
        if match is not None:
            needed = {*match.node.path, match.source or match.node}
            available -= sum(len(node.pages) for node in needed if node.ref_count == 0)
        return self.missing_pages(sequence, match) <= available
