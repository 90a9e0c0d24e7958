"""Reader of image bytes in shared memory, the engine's side."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from legato_engine.errors import InternalError, exhaustion
from legato_engine.shm.blob_store import (
    GENERATION,
    HEADER_SIZE,
    RELEASED,
    RETIRED,
    SIZE,
    blob_folder,
    map_segment,
    mapped,
    namespace_of,
)
from legato_engine.types import BlobRef


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
