"""The pool of KV pages."""

from __future__ import annotations

from collections.abc import Iterable

SCRATCH_PAGE = 0
"""Written by the padding rows of a batch; never allocated."""


class PagePool:
    """Allocates the page ids `[1, num_pages)`, each to one owner at a time."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"{num_pages} pages leave none beside the scratch page"
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._allocated = bytearray(num_pages)
        self.num_usable = num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The ids of the pages without an owner."""
        return tuple(self._free)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` pages, having checked `can_allocate`."""
        assert self.can_allocate(count), f"{count} pages requested, {len(self._free)} are free"
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._allocated[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give allocated pages back."""
        for page in pages:
            assert self._allocated[page], f"double free of page {page}"
            self._allocated[page] = 0
            self._free.append(page)
