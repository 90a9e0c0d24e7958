"""KV pages: owners, contents and waste.

A page is committed or draft. Committed pages hold accepted positions. Draft pages are taken for
draft tokens and freed at once if those are rejected. A page with several holders is shared: its
owner goes on writing after the part that the others read, and a borrower copies it before its first
write.
"""

from __future__ import annotations

import dataclasses
import enum

from legato_engine.speculative.block_policy import PRESSURE_RATIO


class PageState(enum.IntEnum):
    """The use of a page."""

    FREE = 0
    DRAFT = 1
    COMMITTED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ResidencyReport:
    """The pool at one moment, and its counters since the start.

    `fragmentation_ratio` is the share of all draft pages that were freed unaccepted. `hit_rate` is
    the share of prompt positions whose KV was found instead of computed.
    """

    num_pages: int
    free: int
    draft: int
    committed: int
    shared: int  # committed pages with more than one holder
    fragmentation_ratio: float
    hit_rate: float


class PageTable:
    """The page pool; `entries[page][slot]` is the token whose KV is there, None when unwritten."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.entries: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self._state = [PageState.FREE] * num_pages
        self._holders: list[set[int]] = [set() for _ in range(num_pages)]
        self._owner = [-1] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_drafted = self.num_discarded = 0  # draft pages taken, and freed unaccepted
        self.num_found = self.num_computed = 0  # prompt positions

    # ------------------------------------------------------------ state

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    @property
    def is_under_pressure(self) -> bool:
        """Whether more than `PRESSURE_RATIO` of the pool is in use."""
        return self.num_pages - self.num_free > PRESSURE_RATIO * self.num_pages

    def pages_for(self, num_positions: int) -> int:
        """Pages that so many positions need."""
        return -(-num_positions // self.page_size)

    def holders(self, page: int) -> frozenset[int]:
        """The requests that hold a page."""
        return frozenset(self._holders[page])

    def report(self) -> ResidencyReport:
        """The pool's current state."""
        prompt = self.num_found + self.num_computed
        return ResidencyReport(
            num_pages=self.num_pages,
            free=self.num_free,
            draft=self._state.count(PageState.DRAFT),
            committed=self._state.count(PageState.COMMITTED),
            shared=sum(len(holders) > 1 for holders in self._holders),
            fragmentation_ratio=self.num_discarded / self.num_drafted if self.num_drafted else 0.0,
            hit_rate=self.num_found / prompt if prompt else 0.0,
        )

    # ------------------------------------------------------------ holding

    def allocate(self, request_id: int, state: PageState) -> int:
        """Take a free page, which must exist."""
        page = self._free.pop()
        assert not self._holders[page], f"page {page} is free and held"
        self._holders[page].add(request_id)
        self._owner[page] = request_id
        self._state[page] = state
        self.num_drafted += state is PageState.DRAFT
        return page

    def borrow(self, request_id: int, page: int) -> None:
        """Add a holder to a committed page."""
        assert self._state[page] is PageState.COMMITTED, f"page {page} is not committed"
        assert request_id not in self._holders[page], f"page {page} is borrowed twice"
        self._holders[page].add(request_id)

    def release(self, request_id: int, page: int) -> None:
        """Remove a holder; the last one frees the page."""
        self._holders[page].remove(request_id)
        if self._holders[page]:
            if self._owner[page] == request_id:
                self._owner[page] = -1
            return
        self.num_discarded += self._state[page] is PageState.DRAFT
        self._state[page] = PageState.FREE
        self._owner[page] = -1
        self.entries[page] = [None] * self.page_size
        self._free.append(page)

    def commit(self, page: int) -> None:
        """Mark a page's positions as accepted."""
        self._state[page] = PageState.COMMITTED

    def claim(self, request_id: int, page: int) -> bool:
        """Whether a holder may write in place, as the owner or the last holder."""
        if self._holders[page] == {request_id}:
            self._owner[page] = request_id
        return self._owner[page] == request_id

    def copy(self, request_id: int, page: int) -> int:
        """Replace a borrowed page by an own copy."""
        own = self.allocate(request_id, PageState.COMMITTED)
        self.entries[own] = list(self.entries[page])
        self.release(request_id, page)
        return own

    # ------------------------------------------------------------ content

    def write(self, request_id: int, page_ids: list[int], position: int, token: int) -> None:
        """Write the KV of `token` to a page that the request owns."""
        page = page_ids[position // self.page_size]
        assert self._owner[page] == request_id, f"request {request_id} writes page {page}"
        self.entries[page][position % self.page_size] = token

    def read(self, page_ids: list[int], position: int) -> int:
        """The token whose KV is at `position`, which must have been written."""
        token = self.entries[page_ids[position // self.page_size]][position % self.page_size]
        assert token is not None, f"position {position} is read before it is written"
        return token
