"""Shared prefixes: the KV of BOS and an image, computed once and read by many sequences."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from legato_engine.kv_cache.block_pool import BlockPool


@dataclasses.dataclass(slots=True, eq=False)
class PrefixEntry:
    """A prefix of `length` positions in `pages`, which the entry owns.

    `refs` counts the sequences that hold it. `ready` says that one more may: the launch which
    computes it is enqueued, so whatever is enqueued later may read it, and no reader has found it
    bad. An entry that is not ready goes with its last holder.
    """

    key: str
    pages: tuple[int, ...]
    length: int
    refs: int = 1
    ready: bool = False


class PrefixCache:
    """Prefixes by content key; those nobody holds stay until their pages are needed."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[str, PrefixEntry] = {}
        self._idle: OrderedDict[str, PrefixEntry] = OrderedDict()  # unreferenced, oldest use first
        self.idle_pages = 0

    def find(self, key: str) -> PrefixEntry | None:
        """The entry of `key`, ready or not."""
        return self._entries.get(key)

    def create(self, key: str, length: int, num_pages: int) -> PrefixEntry:
        """A new entry, held by the caller, who will compute it."""
        assert key not in self._entries, f"prefix {key} exists"
        entry = PrefixEntry(key, self._pool.allocate(num_pages), length)
        self._entries[key] = entry
        return entry

    def acquire(self, entry: PrefixEntry) -> None:
        """One more holder, who will read it."""
        assert entry.ready, f"prefix {entry.key} is read before its computation is enqueued"
        if entry.refs == 0:
            del self._idle[entry.key]
            self.idle_pages -= len(entry.pages)
        entry.refs += 1

    def release(self, key: str) -> None:
        """One holder less; the last one leaves a ready entry idle and takes any other along."""
        entry = self._entries[key]
        assert entry.refs > 0, f"prefix {key} is released but nobody holds it"
        entry.refs -= 1
        if entry.refs > 0:
            return
        if entry.ready:
            self._idle[key] = entry
            self.idle_pages += len(entry.pages)
        else:
            self._drop(entry)

    def make_room(self, count: int) -> None:
        """Evict idle entries, least recently used first, until `count` pages are free."""
        while not self._pool.can_allocate(count):
            assert self._idle, f"{count} pages asked, nothing left to evict"
            _, entry = self._idle.popitem(last=False)
            self.idle_pages -= len(entry.pages)
            self._drop(entry)

    def _drop(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        self._pool.free(entry.pages)
