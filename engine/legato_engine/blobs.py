"""Picture bytes between processes: files in shared memory, written once and read once.

The service writes a blob under its own namespace and names it in the request. The engine maps it
and unlinks it at once, so its memory goes with the last view. Whatever an engine did not take, the
service unlinks when the request ends.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import pathlib
import secrets
import tempfile

from legato_engine.core import BlobRef
from legato_engine.errors import InternalError, QueueFull


@functools.cache
def blob_folder() -> pathlib.Path:
    """Shared memory as files, or the folder for temporary files where there is none."""
    shared = pathlib.Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else pathlib.Path(tempfile.gettempdir())


def new_namespace() -> str:
    """A prefix that no other service process uses."""
    return f"legato-{os.getpid()}-{secrets.token_hex(8)}"


class BlobStore:
    """The service's side; every blob's name starts with `namespace`."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._folder = blob_folder()
        self._live: set[str] = set()

    def __len__(self) -> int:
        """Blobs written and not yet discarded."""
        return len(self._live)

    def put(self, data: bytes | memoryview) -> BlobRef:
        """Write `data`, readable by this user alone.

        Raises `QueueFull` when shared memory is full.
        """
        name = f"{self.namespace}-{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._folder / name, flags, 0o600)
        self._live.add(name)
        ref = BlobRef(name=name, size=len(data))
        try:
            _write_all(descriptor, memoryview(data))
        except OSError as error:
            self.discard(ref)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise QueueFull("shared memory is full", retry_after_ms=1000) from error
            raise
        finally:
            os.close(descriptor)
        return ref

    def discard(self, ref: BlobRef) -> None:
        """Unlink a blob that may have been taken already; a second call does nothing."""
        if ref.name in self._live:
            self._live.discard(ref.name)
            (self._folder / ref.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlink everything left in the namespace."""
        self._live.clear()
        for path in self._folder.glob(f"{self.namespace}-*"):
            path.unlink(missing_ok=True)


def take_blob(ref: BlobRef, namespace: str) -> memoryview:
    """The engine's side: a read-only view of a blob, which is unlinked before this returns.

    The memory is freed with the last view. Raises `InternalError` when the name is not a plain name
    within `namespace`, when the blob is gone, or when it is shorter than it claims.
    """
    if not ref.name.startswith(f"{namespace}-") or "/" in ref.name:
        raise InternalError("blob name outside of the namespace")
    path = blob_folder() / ref.name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InternalError("the blob is gone") from error
    try:
        path.unlink(missing_ok=True)
        if os.fstat(descriptor).st_size < ref.size:
            raise InternalError("the blob is shorter than it claims")
        if ref.size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(descriptor, ref.size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    """`write` and not a mapping: a full /dev/shm is an error here, a SIGBUS there."""
    while data:
        data = data[os.write(descriptor, data) :]
