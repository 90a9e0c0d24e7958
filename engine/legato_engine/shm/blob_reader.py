"""The engine's side of picture bytes: blobs that a service named become views of memory."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from legato_engine.core import BlobRef
from legato_engine.errors import InternalError
from legato_engine.shm.blob_store import blob_folder, mapped, namespace_of
from legato_engine.shm.segment_pool import (
    GENERATION,
    HEADER_SIZE,
    RELEASED,
    RETIRED,
    SIZE,
    map_segment,
)


class BlobReader:
    """Takes blobs of the services whose namespaces begin with `namespace`; any thread may call.

    A segment stays mapped until its service retires it, which is noticed when the next one comes,
    or is gone (`forget`).
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._segments: dict[str, _Mapped] = {}  # by name

    def __len__(self) -> int:
        """Segments that are mapped."""
        return len(self._segments)

    def take(self, ref: BlobRef) -> memoryview:
        """A read-only view of a blob, whose name is unlinked before this returns.

        A blob is taken once; what it occupies is free with the last view. Raises `InternalError`
        when the name is not a plain name within the namespace, when the blob is gone, or when it is
        shorter than it claims.
        """
        if not ref.name.startswith(f"{self._namespace}-") or "/" in ref.name:
            raise InternalError("blob name outside of the namespace")
        if not ref.generation:
            return _take_file(ref)
        with self._lock:
            segment = self._segments.get(ref.name) or self._map(ref)
            return segment.take(ref)

    def forget(self, namespace: str) -> None:
        """The service that wrote in exactly this namespace is gone."""
        with self._lock:
            for name in [each for each in self._segments if namespace_of(each) == namespace]:
                del self._segments[name]

    def _map(self, ref: BlobRef) -> _Mapped:
        for name in [name for name, each in self._segments.items() if each.is_retired]:
            del self._segments[name]
        descriptor = _open(ref.name, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size <= HEADER_SIZE:
                raise InternalError("the blob is shorter than it claims")
            segment = self._segments[ref.name] = _Mapped(map_segment(descriptor, size))
        finally:
            os.close(descriptor)
        return segment


class _Mapped:
    """A segment, until the last view of it and the reader have let it go."""

    __slots__ = ("_header", "_mapping", "_taken", "_view")

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._header = memoryview(mapping)[:HEADER_SIZE].cast("Q")
        self._taken = 0  # the last generation
        self._view: weakref.ref[np.ndarray[Any, Any]] | None = None  # of it

    @property
    def is_retired(self) -> bool:
        """Whether its service is done with it for good."""
        return self._header[RETIRED] != 0

    def take(self, ref: BlobRef) -> memoryview:
        """The content of the generation that `ref` names, which is released with the last view."""
        if ref.generation <= self._taken or ref.generation != self._header[GENERATION]:
            raise InternalError("the blob is gone")
        if ref.size > min(self._header[SIZE], len(self._mapping) - HEADER_SIZE):
            raise InternalError("the blob is shorter than it claims")
        self._taken = ref.generation
        # Every view of an array, and every view of a view, holds the array itself.
        content_N = np.frombuffer(self._mapping, np.uint8, ref.size, HEADER_SIZE)
        content_N.flags.writeable = False
        # The callback must not know this object, which would then know itself, and stay.
        header, generation = self._header, ref.generation
        self._view = weakref.ref(content_N, lambda _: header.__setitem__(RELEASED, generation))
        return content_N.data


def _take_file(ref: BlobRef) -> memoryview:
    """The view of a file of its own."""
    descriptor = _open(ref.name, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_size < ref.size:
            raise InternalError("the blob is shorter than it claims")
        return mapped(descriptor, ref.size)
    finally:
        os.close(descriptor)


def _open(name: str, access: int) -> int:
    """The descriptor of a file in the blobs' folder, which is unlinked."""
    path = blob_folder() / name
    try:
        descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InternalError("the blob is gone") from error
    path.unlink(missing_ok=True)
    return descriptor
