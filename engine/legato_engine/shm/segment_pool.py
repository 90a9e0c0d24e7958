"""A pool of shared-memory segments that are reused for image after image.

A new file per image costs several times the copy of its bytes: the kernel clears its pages, and
both processes fault them in. The first reader unlinks a segment's file, so that its memory is freed
with the two processes however they end.

The engine writes `RELEASED`, the last generation that it has released, the service the other words.
The service overwrites released content only.
"""

from __future__ import annotations

import collections
import errno
import mmap
import os
import pathlib

from legato_engine.core.images import BlobRef

HEADER_SIZE = 64
GENERATION, SIZE, RELEASED, RETIRED = range(4)  # words of the header
"""`GENERATION` 0: never written. `RELEASED` 0: never released."""

SMALLEST, LARGEST = 64 * 1024, 4 * 1024 * 1024
"""Bounds of segment sizes in bytes, powers of two; larger images are files of their own."""

POOL_BYTES = 16 * 1024 * 1024
"""Bytes of all segments of a service process."""


def map_segment(descriptor: int, size: int) -> mmap.mmap:
    """Map a segment and populate its pages; page faults would cost more than the copy."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class _Segment:
    """The service's side of a segment."""

    __slots__ = ("_content", "_header", "_mapping", "generation", "name", "path", "size")

    def __init__(self, path: pathlib.Path, size: int) -> None:
        self.path = path
        self.name = path.name
        self.size = size
        self.generation = 0
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(
                descriptor, 0, size
            )  # raises without space; a later write would get SIGBUS
            self._mapping = map_segment(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        whole = memoryview(self._mapping)
        self._header = whole[:HEADER_SIZE].cast("Q")
        self._content = whole[HEADER_SIZE:]

    @property
    def released(self) -> bool:
        return self._header[RELEASED] == self.generation

    @property
    def was_read(self) -> bool:
        """Whether an engine has mapped it and unlinked the file."""
        return self._header[RELEASED] > 0

    def write(self, data: bytes | memoryview) -> BlobRef:
        self._content[: len(data)] = data
        self.generation += 1
        self._header[SIZE] = len(data)
        self._header[GENERATION] = self.generation
        return BlobRef(name=self.name, size=len(data), generation=self.generation)

    def content(self, size: int) -> memoryview:
        return self._content[:size].toreadonly()

    def retire(self) -> None:
        """Give the segment up; its memory is freed when the engine has unmapped it."""
        self._header[RETIRED] = 1
        self._header.release()
        self._content.release()
        self._mapping.close()
        self.path.unlink(missing_ok=True)


class SegmentPool:
    """The segments of a service process, `limit` bytes at most. Belongs to one thread."""

    def __init__(self, folder: pathlib.Path, limit: int = POOL_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._size = 0
        self._busy: dict[str, _Segment] = {}  # by name, between `put` and `discard`
        self._unread: collections.deque[_Segment] = collections.deque()  # discarded, not released
        self._free: list[_Segment] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._busy) + len(self._unread) + len(self._free)

    def put(self, data: bytes | memoryview, name: str) -> BlobRef | None:
        """Write to a free segment, or to a new one of this `name`, if possible."""
        needed = HEADER_SIZE + len(data)
        if needed > LARGEST:
            return None
        size = max(SMALLEST, 1 << (needed - 1).bit_length())
        segment = self._reuse(size) or self._create(size, name)
        if segment is None:
            return None
        self._busy[segment.name] = segment
        return segment.write(data)

    def read(self, ref: BlobRef) -> memoryview:
        return self._busy[ref.name].content(ref.size)

    def discard(self, ref: BlobRef) -> None:
        segment = self._busy.pop(ref.name, None)
        if segment is None:
            return  # already retired
        if segment.released:
            self._free.append(segment)
        elif segment.was_read:
            self._unread.append(segment)
        else:  # if never read, the file would stay
            self._retire(segment)

    def clear(self) -> None:
        for segment in (*self._busy.values(), *self._unread, *self._free):
            self._retire(segment)
        self._busy.clear()
        self._unread.clear()
        self._free.clear()

    def _reuse(self, size: int) -> _Segment | None:
        return self._pop_free(size) or (self._pop_free(size) if self._collect() else None)

    def _pop_free(self, size: int) -> _Segment | None:
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index].size == size:
                return self._free.pop(index)
        return None

    def _collect(self) -> bool:
        before = len(self._free)
        for _ in range(len(self._unread)):
            segment = self._unread.popleft()
            (self._free if segment.released else self._unread).append(segment)
        return len(self._free) > before

    def _create(self, size: int, name: str) -> _Segment | None:
        while self._size + size > self._limit:
            if self._free:
                self._retire(self._free.pop(0))
            elif self._unread:
                self._retire(self._unread.popleft())
            else:
                return None
        try:
            segment = _Segment(self._folder / name, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return None
            raise
        self._size += size
        return segment

    def _retire(self, segment: _Segment) -> None:
        self._size -= segment.size
        segment.retire()
