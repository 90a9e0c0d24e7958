"""The service's side of image bytes: writes blobs to shared memory.

Most images use pooled segments (`segment_pool`). Large images and the uploads of a `BlobWriter` are
files of their own, which the engine unlinks. The service unlinks blobs that the engine did not take
when their request ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import pathlib
import re
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

from legato_engine.core.images import BlobRef
from legato_engine.errors import QueueFull
from legato_engine.shm.owner_lock import OwnerLock, sweep_files
from legato_engine.shm.segment_pool import SegmentPool

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
    """Hold a namespace, and those that begin with it, until the lock is released.

    Raises:
        OSError: the folder of the blobs takes no files.
    """
    return OwnerLock(blob_folder() / f".{namespace}.lock")


def private_path(namespace: str, name: str) -> pathlib.Path:
    """The path of a file that is no blob; it is swept with the namespace."""
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
        """Give up a blob, taken or not. Idempotent."""
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
    """Gathers bytes in a file in shared memory; `publish` makes blobs of them.

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
