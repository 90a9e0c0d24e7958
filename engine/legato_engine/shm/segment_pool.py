"""Shared memory that is kept: pictures are written into it again and again.

A new file for every picture costs the kernel its pages, which it clears, and both processes their
page faults; that is several times what copying the bytes costs. A segment is a file that both map
once. Its first reader unlinks it, so that its memory goes with the two processes however they end.

A segment begins with a header of words, each with one writer: the generation and the size of its
content and whether it is given up are the service's, the last generation that nobody reads any more
is the engine's. The service writes again only what the engine has released; what
an engine may still read, or may yet begin to read, is never written.
"""

from __future__ import annotations

import collections
import errno
import mmap
import os
import pathlib

from legato_engine.core import BlobRef

HEADER_SIZE = 64
GENERATION, SIZE, RELEASED, RETIRED = range(4)  # words of the header
"""`GENERATION` 0 was never written, `RELEASED` 0 never read to its end."""

SMALLEST, LARGEST = 64 * 1024, 4 * 1024 * 1024
"""Sizes of segments, powers of two; larger pictures are files of their own."""

POOL_BYTES = 16 * 1024 * 1024
"""That the segments of a service process take together."""


def map_segment(descriptor: int, size: int) -> mmap.mmap:
    """A segment, its pages mapped at once: faults one by one cost more than the copy."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class _Segment:
    """The service's side of one."""

    __slots__ = ("_content", "_header", "_mapping", "generation", "name", "path", "size")

    def __init__(self, path: pathlib.Path, size: int) -> None:
        """Raises `OSError`, of which ENOSPC says that shared memory is full."""
        self.path = path
        self.name = path.name
        self.size = size
        self.generation = 0
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a full memory is an error here, later SIGBUS
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
        """Whether nobody reads its content, now or later."""
        return self._header[RELEASED] == self.generation

    @property
    def was_read(self) -> bool:
        """Whether an engine has mapped it, and unlinked the file."""
        return self._header[RELEASED] > 0

    def write(self, data: bytes | memoryview) -> BlobRef:
        """New content for the one who is told of it."""
        self._content[: len(data)] = data
        self.generation += 1
        self._header[SIZE] = len(data)
        self._header[GENERATION] = self.generation
        return BlobRef(name=self.name, size=len(data), generation=self.generation)

    def retire(self) -> None:
        """Give the memory up: it goes as soon as an engine that has it mapped notices."""
        self._header[RETIRED] = 1
        self._header.release()
        self._content.release()
        self._mapping.close()
        self.path.unlink(missing_ok=True)


class SegmentPool:
    """A service process's segments, `limit` bytes at most. Belongs to one thread."""

    def __init__(self, folder: pathlib.Path, limit: int = POOL_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._size = 0  # of all segments
        self._busy: dict[str, _Segment] = {}  # by name, between `put` and `discard`
        self._unread: collections.deque[_Segment] = collections.deque()  # discarded, not released
        self._free: list[_Segment] = []  # the last one was used last

    def __len__(self) -> int:
        """Segments that are kept."""
        return len(self._busy) + len(self._unread) + len(self._free)

    def put(self, data: bytes | memoryview, name: str) -> BlobRef | None:
        """Write into a segment that is free, or into a new one of this `name`.

        None when the bytes are too many, or there is no room.
        """
        needed = HEADER_SIZE + len(data)
        if needed > LARGEST:
            return None
        size = max(SMALLEST, 1 << (needed - 1).bit_length())
        segment = self._reuse(size) or self._create(size, name)
        if segment is None:
            return None
        self._busy[segment.name] = segment
        return segment.write(data)

    def discard(self, ref: BlobRef) -> None:
        """Whoever was told of it needs it no more, and may not have read it at all."""
        segment = self._busy.pop(ref.name, None)
        if segment is None:
            return  # retired meanwhile
        if segment.released:
            self._free.append(segment)
        elif segment.was_read:
            self._unread.append(segment)
        else:  # perhaps never will be, and then the file would stay
            self._retire(segment)

    def clear(self) -> None:
        """Retire all segments: the engine that knew them is gone."""
        for segment in (*self._busy.values(), *self._unread, *self._free):
            self._retire(segment)
        self._busy.clear()
        self._unread.clear()
        self._free.clear()

    def _reuse(self, size: int) -> _Segment | None:
        return self._pop_free(size) or (self._pop_free(size) if self._collect() else None)

    def _pop_free(self, size: int) -> _Segment | None:
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at].size == size:
                return self._free.pop(at)
        return None

    def _collect(self) -> bool:
        """Take back what was discarded while it was still read; whether there was any."""
        before = len(self._free)
        for _ in range(len(self._unread)):
            segment = self._unread.popleft()
            (self._free if segment.released else self._unread).append(segment)
        return len(self._free) > before

    def _create(self, size: int, name: str) -> _Segment | None:
        while self._size + size > self._limit:  # of what does not fit, the longest unused goes
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
