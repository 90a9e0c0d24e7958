"""How many pages a sequence needs, and whether they are to be had."""

from __future__ import annotations

from legato_engine.kv_cache.page_pool import PagePool
from legato_engine.kv_cache.radix_tree import Match, RadixTree
from legato_engine.sequence import Sequence


class PageBudget:
    """The pool's free pages, and those of the tree that nobody holds: they are evicted for them."""

    def __init__(self, pool: PagePool, tree: RadixTree, page_size: int) -> None:
        self._pool = pool
        self._tree = tree
        self._page_size = page_size

    @property
    def num_pages(self) -> int:
        """Pages that could be taken now."""
        return self._pool.num_free + self._tree.idle_pages

    def take(self, count: int) -> tuple[int, ...]:
        """So many pages, of `num_pages`."""
        self._tree.make_room(count)
        return self._pool.allocate(count)

    def pages_for(self, length: int) -> int:
        """Pages of so many positions."""
        return -(-length // self._page_size)

    def first_pages(self, sequence: Sequence) -> int:
        """Pages of its table when it is admitted: of what is fed, and of the first token."""
        return self.pages_for(min(sequence.length + 1, sequence.max_length))

    def missing_pages(self, sequence: Sequence, match: Match | None) -> int:
        """Pages to allocate: private ones, and a unit's own when nobody has computed it."""
        first = self.first_pages(sequence)
        if match is not None:
            return first - match.node.length // self._page_size
        if sequence.prefix_key is None:
            return first
        unit = sequence.image_prefix_length
        return first - unit // self._page_size + self.pages_for(unit)

    def fits(self, sequence: Sequence, match: Match | None, available: int) -> bool:
        """Whether so many pages, of which some are idle and to be held, are enough."""
        if match is not None:
            needed = {*match.node.path, match.source or match.node}
            available -= sum(len(node.pages) for node in needed if node.ref_count == 0)
        return self.missing_pages(sequence, match) <= available
