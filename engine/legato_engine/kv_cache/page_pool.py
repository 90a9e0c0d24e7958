"""The pool of KV pages."""

from __future__ import annotations

from collections.abc import Iterable

SCRATCH_PAGE = 0
"""Rows that pad a batch write here; it is never handed out."""


class PagePool:
    """Hands out page ids `1 .. num_pages - 1`, each to one holder at a time."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"a pool of {num_pages} pages has none beside the scratch page"
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._held = bytearray(num_pages)
        self.num_usable = num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def free_pages(self) -> tuple[int, ...]:
        """The pages nobody holds."""
        return tuple(self._free)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages; the caller has asked `can_allocate`."""
        assert self.can_allocate(count), f"asked for {count} pages, {len(self._free)} are free"
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._held[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, each exactly once."""
        for page in pages:
            assert self._held[page], f"page {page} is freed but nobody holds it"
            self._held[page] = 0
            self._free.append(page)
