"""Shared memory for image bytes: the service's blobs and the engine's reader.

The kernel releases a lock with the process that holds it, however that ends; process ids are used
again, and mean nothing in another container that shares the folder.

The folders are shared with other programs, whose names may look like ours. A lock is ours if it is
a regular file of this user and of mode 0600 whose content is `_MARKER`; what it protects has modes
and names that only this package gives.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import functools
import mmap
import os
import pathlib
import re
import secrets
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from legato_engine.errors import InternalError, QueueFull, exhaustion
from legato_engine.types import BlobRef

_FLAGS = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_MARKER = b"lock of a Legato server process\n"


class OwnerLock:
    """A lock file that this process holds until `release`."""

    def __init__(self, path: pathlib.Path) -> None:
        """Make and lock the file."""
        self._path = path
        while True:
            descriptor = os.open(path, _FLAGS, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _names(path, descriptor):
                break
            os.close(descriptor)  # swept between the two calls
        os.pwrite(descriptor, _MARKER, 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file. Idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def sweep_files(folder: pathlib.Path, lock_name: re.Pattern[str]) -> int:
    """Remove the files of dead owners in `folder`; return how many.

    The first group of `lock_name` is the prefix of its owner's files, which may begin with a dot.
    """
    removed = 0
    for lock in _entries(folder):
        if (match := lock_name.fullmatch(lock.name)) is None:
            continue
        with _abandoned(lock) as is_abandoned:
            if is_abandoned:
                owned = (*folder.glob(f"{match[1]}-*"), *folder.glob(f".{match[1]}-*"))
                private = [path for path in owned if _is_private(path, stat.S_IFREG | 0o600)]
                for path in (*private, lock):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        removed += path is not lock
    return removed


def sweep_folders(
    parent: pathlib.Path, name: re.Pattern[str], lock_name: str, files: Collection[str]
) -> int:
    """Remove the folders of dead owners, each with a lock in it; return how many.

    Only `files` are removed from a folder. One that holds anything else stays.
    """
    removed = 0
    for folder in _entries(parent):
        if name.fullmatch(folder.name) is None or not _is_private(folder, stat.S_IFDIR | 0o700):
            continue
        with _abandoned(folder / lock_name) as is_abandoned:
            if is_abandoned and {path.name for path in _entries(folder)} <= {lock_name, *files}:
                with contextlib.suppress(OSError):
                    for each in (*files, lock_name):
                        (folder / each).unlink(missing_ok=True)
                    folder.rmdir()
                    removed += 1
    return removed


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """List a folder; one that cannot be read has nothing to sweep."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


@contextlib.contextmanager
def _abandoned(lock: pathlib.Path) -> Iterator[bool]:
    """Yield whether a lock of this user has no owner; nothing can take it within the block."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, descriptor)
            if is_lock := _is_lock(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # there is none, it is another user's, or its owner lives
            is_lock = False
        yield is_lock and _names(lock, descriptor)


def _names(path: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def _is_lock(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return (found.st_uid, found.st_mode) == (os.geteuid(), stat.S_IFREG | 0o600) and os.pread(
        descriptor, len(_MARKER) + 1, 0
    ) == _MARKER


def _is_private(path: pathlib.Path, mode: int) -> bool:
    """Return whether a file is this user's and has this type and mode; follow no links."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return (found.st_uid, found.st_mode) == (os.geteuid(), mode)


# ---------------------------------------------------------------- segment pool

# Segments are reused, because a new file per image costs several times the copy of its bytes: the
# kernel clears its pages, and both processes fault them in. The first reader unlinks a segment's
# file, so the kernel frees the memory when both processes have ended, however they end.
#
# The engine writes `RELEASED`, the last generation that it has released; the service writes the
# other header fields and overwrites released content only.

HEADER_SIZE = 64
GENERATION, SIZE, RELEASED, RETIRED = range(4)  # 8-byte fields of the header
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
            os.posix_fallocate(descriptor, 0, size)  # else a write without space raises SIGBUS
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
        """Return whether an engine has mapped the blob and unlinked the file."""
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
        """Retire the segment; its memory is freed when the engine has unmapped it."""
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
        segment = self._pop_free(size)
        if segment is None:
            self._collect()
            segment = self._pop_free(size) or self._create(size, name)
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

    def _pop_free(self, size: int) -> _Segment | None:
        latest_first = enumerate(reversed(self._free), start=1)
        at = next((at for at, segment in latest_first if segment.size == size), None)
        return None if at is None else self._free.pop(-at)

    def _collect(self) -> None:
        for _ in range(len(self._unread)):
            segment = self._unread.popleft()
            (self._free if segment.released else self._unread).append(segment)

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


# ---------------------------------------------------------------- blob store

# Most images use pooled segments. Large images and the uploads of a `BlobWriter` are files of their
# own, which the engine unlinks. The service unlinks blobs that the engine did not read when their
# request ends.

_MAX_APPEND = 4 * 1024 * 1024  # bytes per system call, which takes a few milliseconds


@functools.cache
def blob_folder() -> pathlib.Path:
    shared = pathlib.Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else pathlib.Path(tempfile.gettempdir())


def new_namespace() -> str:
    return f"legato-{os.getpid()}-{secrets.token_hex(8)}"


_LOCK_NAME = re.compile(r"\.(legato-\d+-[0-9a-f]{16})\.lock")
"""Of the lock of a namespace; the dot hides it from whatever lists blobs."""


def own_namespace(namespace: str) -> OwnerLock:
    """Hold a namespace, and those that begin with it, until the lock is released."""
    return OwnerLock(blob_folder() / f".{namespace}.lock")


def private_path(namespace: str, name: str) -> pathlib.Path:
    """Return the path of a file that is not a blob; it is swept with the namespace."""
    return blob_folder() / f".{namespace}-{name}"


def sweep_blobs() -> int:
    """Remove the blobs of namespaces whose owner is dead; return how many."""
    return sweep_files(blob_folder(), _LOCK_NAME)


def namespace_of(name: str) -> str:
    return name.rpartition("-")[0]


class BlobStore:
    """The blobs of a service process; their names begin with `namespace`."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._folder = blob_folder()
        self._pool = SegmentPool(self._folder)
        self._live: dict[str, int] = {}  # generation by name
        self._next_name = self._new_name()  # of the next segment

    def __len__(self) -> int:
        return len(self._live)

    def put(self, data: bytes | memoryview) -> BlobRef:
        """Write `data` to a blob that only this user can read.

        Raises:
            QueueFull: shared memory is full.
        """
        ref = self._pool.put(data, self._next_name)
        if ref is not None:
            self._live[ref.name] = ref.generation
            if ref.name == self._next_name:
                self._next_name = self._new_name()
            return ref
        name, descriptor = self._create()
        ref = BlobRef(name=name, size=len(data))
        try:
            _write_all(descriptor, memoryview(data))
        except BaseException:
            self.discard(ref)
            raise
        finally:
            os.close(descriptor)
        return ref

    def open_writer(self) -> BlobWriter:
        name, descriptor = self._create()
        return BlobWriter(self, name, descriptor)

    def link(self, name: str, size: int) -> BlobRef:
        """Make a blob that shares the bytes of another, of this store or another."""
        ref = BlobRef(name=self._new_name(), size=size)
        os.link(self._folder / name, self._folder / ref.name)
        self._live[ref.name] = 0
        return ref

    @contextlib.contextmanager
    def read(self, ref: BlobRef) -> Iterator[memoryview]:
        """Yield the bytes of a blob that no engine has taken."""
        if ref.generation:
            yield self._pool.read(ref)
            return
        descriptor = os.open(self._folder / ref.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            view = mapped(descriptor, ref.size)
        finally:
            os.close(descriptor)
        yield view

    def discard(self, ref: BlobRef) -> None:
        """Discard a blob, whether read or not. Idempotent."""
        if self._live.get(ref.name) != ref.generation:
            return
        del self._live[ref.name]
        if ref.generation:
            self._pool.discard(ref)
        else:
            (self._folder / ref.name).unlink(missing_ok=True)

    def retire_segments(self) -> None:
        """Retire all segments, because the engine that mapped them is gone."""
        self._pool.clear()

    def _create(self) -> tuple[str, int]:
        name = self._new_name()
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        self._live[name] = 0
        return name, descriptor

    def _new_name(self) -> str:
        return f"{self.namespace}-{secrets.token_hex(8)}"

    def close(self) -> None:
        self._live.clear()
        self._pool.clear()
        for path in self._folder.glob(f"{self.namespace}-*"):
            path.unlink(missing_ok=True)


class BlobWriter:
    """Writer of a file in shared memory; `publish` makes blobs of its bytes.

    The end of the last reference deletes the bytes. One thread at a time may write; another may
    close.
    """

    def __init__(self, store: BlobStore, name: str, descriptor: int) -> None:
        self._store = store
        self._name = name
        self._descriptor = descriptor
        self._lock = threading.Lock()  # keeps `close` out while the descriptor is in use
        self._end = weakref.finalize(self, _close_file, store, name, descriptor)
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`.

        Raises:
            QueueFull: shared memory is full.
            ValueError: the writer is closed.
        """
        left = memoryview(data)
        while left:
            part = left[:_MAX_APPEND]
            left = left[self._append(lambda: os.write(self._descriptor, part)) :]  # noqa: B023 - called at once

    def copy(self, source: int, offset: int, size: int) -> int:
        """Append up to `size` bytes of a file within the kernel; return how many there were.

        Raises as `write`.
        """
        copied = 0
        while copied < size:
            at, count = offset + copied, min(size - copied, _MAX_APPEND)
            done = self._append(lambda: os.sendfile(self._descriptor, source, at, count))  # noqa: B023 - called at once
            if done == 0:
                break
            copied += done
        return copied

    def head(self, size: int) -> bytes:
        return os.pread(self._descriptor, size, 0)

    def view(self) -> memoryview:
        return mapped(self._descriptor, self.size)

    def publish(self, store: BlobStore) -> BlobRef:
        """Make a blob of the bytes written so far, in this store or another of the process."""
        return store.link(self._name, self.size)

    def keep(self) -> KeptBlob:
        """Keep the bytes written so far beyond the writer's end, without a descriptor."""
        return KeptBlob(self._store, self._name, self.size)

    def close(self) -> None:
        """Delete the bytes; published blobs stay. Idempotent."""
        with self._lock:
            self._end()

    def _append(self, append: Callable[[], int]) -> int:
        with self._lock, _queue_full_without_space():
            if not self._end.alive:
                raise ValueError("the blob writer is closed")
            count = append()
            self.size += count
            return count


class KeptBlob:
    """A file of complete bytes that is no blob itself; `publish` makes blobs of it."""

    def __init__(self, store: BlobStore, name: str, size: int) -> None:
        """Share the bytes of the file `name` in the store's folder."""
        self._path = private_path(store.namespace, secrets.token_hex(8))
        self._end = weakref.finalize(self, self._path.unlink, missing_ok=True)
        os.link(blob_folder() / name, self._path)
        self.size = size

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def publish(self, store: BlobStore) -> BlobRef:
        return store.link(self._path.name, self.size)

    def close(self) -> None:
        """Delete the bytes; published blobs stay. Idempotent."""
        self._end()


def _close_file(store: BlobStore, name: str, descriptor: int) -> None:
    os.close(descriptor)
    store.discard(BlobRef(name=name, size=0))


def mapped(descriptor: int, size: int) -> memoryview:
    """Map the first `size` bytes of a file, read-only, until the last view ends."""
    return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write with system calls: without space they raise, while a mapping gets a SIGBUS."""
    with _queue_full_without_space():
        while data:
            data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _queue_full_without_space() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QueueFull("shared memory is full", retry_after_ms=1000) from error
        raise


# ---------------------------------------------------------------- blob reader

# Reader of image bytes in shared memory, the engine's side.


class BlobReader:
    """Reader of blobs whose namespaces begin with `namespace`; thread-safe.

    A retired segment stays mapped until another segment is mapped, or until `forget`.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._segments: dict[str, _MappedSegment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def take(self, ref: BlobRef) -> memoryview:
        """Return a read-only view of a blob, once; its memory is released with the last view.

        Raises:
            InternalError: the name is outside of the namespace, or the blob is gone or too short.
        """
        if not ref.name.startswith(f"{self._namespace}-") or "/" in ref.name:
            raise InternalError(f"blob {ref.name!r} is outside of namespace {self._namespace!r}")
        if not ref.generation:
            return _take_file(ref)
        with self._lock:
            segment = self._segments.get(ref.name) or self._map(ref)
            return segment.take(ref)

    def forget(self, namespace: str) -> None:
        with self._lock:
            for name in [each for each in self._segments if namespace_of(each) == namespace]:
                del self._segments[name]

    def _map(self, ref: BlobRef) -> _MappedSegment:
        for name in [name for name, each in self._segments.items() if each.is_retired]:
            del self._segments[name]
        descriptor = _open(ref.name, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size <= HEADER_SIZE:
                raise InternalError(f"blob {ref.name!r} has {size} bytes, less than a header")
            segment = self._segments[ref.name] = _MappedSegment(map_segment(descriptor, size))
        finally:
            os.close(descriptor)
        return segment


class _MappedSegment:
    """A mapped segment; unmapped when neither the reader nor a view references it."""

    __slots__ = ("_header", "_mapping", "_taken", "_view")

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._header = memoryview(mapping)[:HEADER_SIZE].cast("Q")
        self._taken = 0  # latest generation
        self._view: weakref.ref[np.ndarray[Any, Any]] | None = None  # of that generation

    @property
    def is_retired(self) -> bool:
        return self._header[RETIRED] != 0

    def take(self, ref: BlobRef) -> memoryview:
        """Return a view; the content is released to the service with the last view."""
        if ref.generation <= self._taken or ref.generation != self._header[GENERATION]:
            raise InternalError(f"generation {ref.generation} of blob {ref.name!r} is gone")
        if ref.size > min(self._header[SIZE], len(self._mapping) - HEADER_SIZE):
            raise InternalError(f"blob {ref.name!r} has fewer than {ref.size} bytes")
        self._taken = ref.generation
        # Every view, also a view of a view, references this array.
        content_N = np.frombuffer(self._mapping, np.uint8, ref.size, HEADER_SIZE)
        content_N.flags.writeable = False
        # The callback must not reference `self`: that would be a cycle, and keep the mapping.
        header, generation = self._header, ref.generation
        self._view = weakref.ref(content_N, lambda _: header.__setitem__(RELEASED, generation))
        return content_N.data


def _take_file(ref: BlobRef) -> memoryview:
    descriptor = _open(ref.name, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < ref.size:
            raise InternalError(f"blob {ref.name!r} has fewer than {ref.size} bytes")
        return mapped(descriptor, ref.size)
    finally:
        os.close(descriptor)


def _open(name: str, access: int) -> int:
    path = blob_folder() / name
    try:
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise exhaustion(error) or InternalError(f"blob {name!r} is gone") from error
    path.unlink(missing_ok=True)
    return descriptor
