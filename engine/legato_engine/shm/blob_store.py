"""Picture bytes between processes: the service's side, which writes them to shared memory.

The service writes a blob under its own namespace and names it in the request; the engine reads it
once (`blob_reader`). Most pictures go through memory that is kept (`blob_pool`); large ones, and
those that come in pieces and are gathered in a draft first, are files that the engine unlinks.
Whatever an engine did not take, the service unlinks when the request ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import pathlib
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

from legato_engine.core import BlobRef
from legato_engine.errors import QueueFull
from legato_engine.shm.segment_pool import SegmentPool

_STEP = 4 * 1024 * 1024  # bytes that a draft takes at a time: a few milliseconds


@functools.cache
def blob_folder() -> pathlib.Path:
    """Shared memory as files, or the folder for temporary files where there is none."""
    shared = pathlib.Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else pathlib.Path(tempfile.gettempdir())


def new_namespace() -> str:
    """A prefix that no other service process uses."""
    return f"legato-{os.getpid()}-{secrets.token_hex(8)}"


def namespace_of(name: str) -> str:
    """The namespace that a blob of this name is in."""
    return name.rpartition("-")[0]


class BlobStore:
    """The service's side; every blob's name starts with `namespace`."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._folder = blob_folder()
        self._pool = SegmentPool(self._folder)
        self._live: dict[str, int] = {}  # generations by name
        self._next_name = self._new_name()  # of the next segment

    def __len__(self) -> int:
        """Blobs written and not yet discarded."""
        return len(self._live)

    def put(self, data: bytes | memoryview) -> BlobRef:
        """Write `data`, readable by this user alone.

        Raises `QueueFull` when shared memory is full.
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

    def draft(self) -> BlobWriter:
        """A blob to be written in pieces; it is there until its end or the store's."""
        name, descriptor = self._create()
        return BlobWriter(self, name, descriptor)

    def link(self, name: str, size: int) -> BlobRef:
        """A blob with the bytes of another, not copied."""
        ref = BlobRef(name=self._new_name(), size=size)
        os.link(self._folder / name, self._folder / ref.name)
        self._live[ref.name] = 0
        return ref

    def discard(self, ref: BlobRef) -> None:
        """End a blob that may have been taken already; a second call does nothing."""
        if self._live.get(ref.name) != ref.generation:
            return
        del self._live[ref.name]
        if ref.generation:
            self._pool.discard(ref)
        else:
            (self._folder / ref.name).unlink(missing_ok=True)

    def renew(self) -> None:
        """The engine is gone: memory that it had mapped is not written again."""
        self._pool.clear()

    def _create(self) -> tuple[str, int]:
        """Name and descriptor of a new file that only this user may open."""
        name = self._new_name()
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        self._live[name] = 0
        return name, descriptor

    def _new_name(self) -> str:
        return f"{self.namespace}-{secrets.token_hex(8)}"

    def close(self) -> None:
        """Unlink everything left in the namespace."""
        self._live.clear()
        self._pool.clear()
        for path in self._folder.glob(f"{self.namespace}-*"):
            path.unlink(missing_ok=True)


class BlobWriter:
    """Bytes that are gathered in shared memory; nobody else knows of them before `publish`.

    It ends with `close` or with the last reference to it, as bytes in this process would. One
    thread at a time writes; another may close meanwhile, which ends the writing by `ValueError`.
    """

    def __init__(self, store: BlobStore, name: str, descriptor: int) -> None:
        self._store = store
        self._name = name
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a descriptor that is in use must not be closed
        self._end = weakref.finalize(self, _end_draft, store, name, descriptor)
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises `QueueFull` when shared memory is full."""
        left = memoryview(data)
        while left:
            part = left[:_STEP]
            left = left[self._step(lambda: os.write(self._descriptor, part)) :]  # noqa: B023 - called at once

    def copy(self, source: int, offset: int, size: int) -> int:
        """Append what a file descriptor has, within the kernel; returns how many bytes that were.

        Fewer than `size` when the source ends before. Raises as `write`.
        """
        copied = 0
        while copied < size:
            at, count = offset + copied, min(size - copied, _STEP)
            done = self._step(lambda: os.sendfile(self._descriptor, source, at, count))  # noqa: B023 - called at once
            if done == 0:
                break
            copied += done
        return copied

    def head(self, size: int) -> bytes:
        """The first bytes."""
        return os.pread(self._descriptor, size, 0)

    def view(self) -> memoryview:
        """All bytes so far, mapped."""
        return mapped(self._descriptor, self.size)

    def publish(self) -> BlobRef:
        """A blob of these bytes, a file of its own; may be called again."""
        return self._store.link(self._name, self.size)

    def close(self) -> None:
        """Forget the bytes; published blobs stay. Idempotent."""
        with self._lock:
            self._end()

    def _step(self, append: Callable[[], int]) -> int:
        with self._lock, _full_memory_told():
            if not self._end.alive:
                raise ValueError("the draft is closed")
            count = append()
            self.size += count
            return count


def _end_draft(store: BlobStore, name: str, descriptor: int) -> None:
    os.close(descriptor)
    store.discard(BlobRef(name=name, size=0))


def mapped(descriptor: int, size: int) -> memoryview:
    """A file's first bytes, read-only, for as long as somebody has a view."""
    return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")


def _write_all(descriptor: int, data: memoryview) -> None:
    """`write` and not a mapping: a full /dev/shm is an error here, a SIGBUS there."""
    with _full_memory_told():
        while data:
            data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _full_memory_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise QueueFull("shared memory is full", retry_after_ms=1000) from error
        raise
