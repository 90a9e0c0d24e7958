"""Images in shared-memory regions of clients, copied out under the contract's rules.

Regions are never mapped: a client that truncates a mapped region kills the reading process
(SIGBUS).
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from legato.v1 import media_pb2
from legato_engine.errors import InvalidField, exhaustion
from legato_engine.shm import BlobStore, BlobWriter, blob_folder

from legato_service.errors import SharedMemoryForbidden, SharedMemoryTorn
from legato_service.images.intake import (
    BlobImage,
    Layout,
    check_complete,
    check_size,
    file_type,
    read_layout,
    take_pixels,
)

HEADER_SIZE = 64
"""Bytes of a slot's header, which precedes the content; content begins at a multiple of it."""

MAGIC = b"LEGATO01"
_HEADER = struct.Struct("<8sQ")  # magic, generation
_INLINE_BYTES = 256 * 1024  # up to here copied on the event loop
_FIELD = "image.shared"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def shm_namespace() -> str:
    """Return `<boot id>:<device>` of this host; empty without shared memory."""
    try:
        return f"{_BOOT_ID.read_text().strip()}:{blob_folder().stat().st_dev}"
    except OSError:
        return ""


class SharedMemory:
    """Reader of slots in regions of this process's own user.

    The first of this process's `stores` takes the images. Only the owner of its files identifies a
    client: TCP carries no peer credentials.
    """

    def __init__(self, stores: Sequence[BlobStore], *, max_bytes: int, max_pixels: int) -> None:
        self._blobs = stores[0]
        self._own_names = tuple(each.namespace for each in stores)
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels
        self._folder = blob_folder()
        self._user = os.geteuid()
        self._name = re.compile(rf"legato-{self._user}-[A-Za-z0-9._-]{{1,200}}")

    async def read(self, shared: media_pb2.SharedImage) -> BlobImage:
        """Copy the slot's content once; a large one on a worker thread. See `ImageIntake.check`."""
        layout = self._check(shared)
        writer = self._blobs.open_writer()
        try:
            if shared.size_bytes > _INLINE_BYTES:
                await asyncio.to_thread(self._copy, shared, writer)
            else:
                self._copy(shared, writer)
            image_format = layout or file_type(
                writer.view(),
                shared.mime_type,
                max_bytes=self._max_bytes,
                max_pixels=self._max_pixels,
                fields=(_FIELD, f"{_FIELD}.mime_type"),
            )
        except BaseException:
            writer.close()
            raise
        return BlobImage(writer, image_format, _FIELD)

    def _check(self, shared: media_pb2.SharedImage) -> Layout | None:
        if shared.WhichOneof("content") is None:
            raise InvalidField("a layout or a MIME type is needed", field=f"{_FIELD}.content")
        if shared.offset < HEADER_SIZE or shared.offset % HEADER_SIZE:
            raise InvalidField(
                f"must be a positive multiple of {HEADER_SIZE}",
                field=f"{_FIELD}.offset",
                actual=shared.offset,
            )
        if shared.generation == 0 or shared.generation % 2:
            raise InvalidField(
                "must be even and above 0, which says that the content is complete",
                field=f"{_FIELD}.generation",
                actual=shared.generation,
            )
        if shared.size_bytes == 0:
            raise InvalidField("must be at least 1", field=f"{_FIELD}.size_bytes")
        check_size(shared.size_bytes, self._max_bytes, "bytes", f"{_FIELD}.size_bytes")
        if not shared.HasField("layout"):
            return None
        layout = read_layout(shared.layout, f"{_FIELD}.layout")
        check_size(layout.width * layout.height, self._max_pixels, "pixels", f"{_FIELD}.layout")
        check_complete(layout, shared.size_bytes, f"{_FIELD}.size_bytes")
        take_pixels(layout.width, layout.height)
        return layout

    def _copy(self, shared: media_pb2.SharedImage, writer: BlobWriter) -> None:
        with self._opened(shared.region) as region:
            end = os.fstat(region).st_size
            if shared.offset + shared.size_bytes > end:
                raise _out_of_bounds(shared, end)
            _check_generation(region, shared)
            if writer.copy(region, shared.offset, shared.size_bytes) < shared.size_bytes:
                raise _out_of_bounds(shared, os.fstat(region).st_size)
            _check_generation(region, shared)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        if self._name.fullmatch(name) is None or name.startswith(self._own_names):
            raise _refused(
                name,
                f"a region's name is legato-{self._user}- and 1 to 200 of A-Z a-z 0-9 . _ -",
            )
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would block
        try:
            region = os.open(self._folder / name, flags)
        except OSError as error:
            raise exhaustion(error) or _refused(
                name, "no such region, or it is not readable; is the client in shm_namespace?"
            ) from None
        try:
            status = os.fstat(region)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self._user:
                raise _refused(name, "a region must be a regular file of the server's own user")
            yield region
        finally:
            os.close(region)


def _check_generation(region: int, shared: media_pb2.SharedImage) -> None:
    header = os.pread(region, _HEADER.size, shared.offset - HEADER_SIZE)
    if len(header) < _HEADER.size:
        raise _out_of_bounds(shared, os.fstat(region).st_size)
    magic, generation = _HEADER.unpack(header)
    if magic != MAGIC:
        raise InvalidField("no slot header precedes the offset", field=f"{_FIELD}.offset")
    if generation != shared.generation:
        raise SharedMemoryTorn(
            f"the slot's generation is {generation}, not {shared.generation}",
            region=shared.region,
            expected=shared.generation,
            actual=generation,
        )


def _out_of_bounds(shared: media_pb2.SharedImage, end: int) -> InvalidField:
    return InvalidField(
        f"the region ends at {end}",
        field=f"{_FIELD}.size_bytes",
        limit=end,
        actual=shared.offset + shared.size_bytes,
    )


def _refused(region: str, why: str) -> SharedMemoryForbidden:
    return SharedMemoryForbidden(why, region=region)
