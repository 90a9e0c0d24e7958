"""Uploads of images."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager

from legato.v1 import image_pb2
from legato_engine.errors import ImageUndecodable, InvalidField
from legato_engine.images.memory import ByteQuota
from legato_engine.shm import BlobStore, BlobWriter, KeptBlob

from legato_service.convert import skills
from legato_service.images.intake import (
    ImageFormat,
    Layout,
    check_complete,
    check_size,
    file_type,
    read_layout,
    take_pixels,
)

CHUNK = "chunk"
_INLINE_BYTES = 1024 * 1024  # up to here written on the event loop


@dataclasses.dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of an upload, in bytes, pixels and seconds."""

    max_bytes: int
    max_pixels: int
    ttl: float
    max_ttl: float


@dataclasses.dataclass(frozen=True, slots=True)
class UploadHeader:
    """A checked header; `size` 0 and an empty `sha256` are unknown."""

    mime_type: str
    layout: Layout | None
    size: int
    sha256: str
    ttl: float


def read_header(message: image_pb2.PutImageRequest | None, limits: UploadLimits) -> UploadHeader:
    """Check the first message of an upload.

    Raises:
        InvalidField: it is not a header, or a field is malformed.
        ImageTooLarge: more bytes or pixels are announced than allowed.
        QuotaExceeded: the caller has sent too many pixels.
    """
    if message is None or message.WhichOneof("part") != "header":
        raise InvalidField("the first message must be a header", field="header")
    header = message.header
    layout = _layout(header, limits) if header.HasField("layout") else None
    if layout is not None and header.mime_type:
        raise InvalidField("must be empty for pixels with a layout", field="header.mime_type")
    check_size(header.size_bytes, limits.max_bytes, "bytes", "header.size_bytes")
    if len(header.sha256) not in (0, 32):
        raise InvalidField(
            "must have 32 bytes, or none",
            field="header.sha256",
            limit=32,
            actual=len(header.sha256),
        )
    asked = skills.seconds(header.ttl) if header.HasField("ttl") else limits.ttl
    ttl = min(asked, limits.max_ttl)
    return UploadHeader(header.mime_type, layout, header.size_bytes, header.sha256.hex(), ttl)


def _layout(header: image_pb2.PutImageHeader, limits: UploadLimits) -> Layout:
    layout = read_layout(header.layout, "header.layout")
    check_size(layout.width * layout.height, limits.max_pixels, "pixels", "header.layout")
    check_size(layout.num_bytes, limits.max_bytes, "bytes", "header.layout")
    take_pixels(layout.width, layout.height)
    return layout


@dataclasses.dataclass(eq=False)
class PartialUpload:
    """The bytes received so far, and their quota."""

    writer: BlobWriter
    _header: UploadHeader
    _limits: UploadLimits
    _quota: ByteQuota
    _owner: str
    _taken: int = 0

    @classmethod
    @contextmanager
    def begin(
        cls,
        header: UploadHeader,
        limits: UploadLimits,
        blobs: BlobStore,
        quota: ByteQuota,
        owner: str,
    ) -> Iterator[PartialUpload]:
        """Yield an upload; free its memory and quota at the end of the block.

        Raises:
            QuotaExceeded: the announced size is above the owner's share.
        """
        with closing(blobs.open_writer()) as writer:
            upload = cls(writer, header, limits, quota, owner)
            upload._take(header.size)
            try:
                yield upload
            finally:
                quota.release(owner, upload._taken)

    def keep(self) -> KeptBlob:
        """Return the bytes; the quota for them is left to the caller."""
        self._taken -= self.writer.size
        return self.writer.keep()

    async def add(self, message: image_pb2.PutImageRequest) -> None:
        """Append the chunk of the next message.

        Raises:
            InvalidField: it is not a chunk, or one too many.
            ImageTooLarge: there are more bytes than allowed.
            QuotaExceeded: the owner's share is used up.
            QueueFull: shared memory is full.
        """
        part = message.WhichOneof("part")
        if part != "chunk":
            problem = "must be sent once" if part else "a part is needed"
            raise InvalidField(problem, field=part or "part")
        chunk = message.chunk  # every access copies the bytes
        size = self.writer.size + len(chunk)
        if self._header.size and size > self._header.size:
            raise self._size_mismatch(size)
        check_size(size, self._limits.max_bytes, "bytes", CHUNK)
        self._take(size - self._taken)
        if len(chunk) > _INLINE_BYTES:
            await asyncio.to_thread(self.writer.write, chunk)
        else:
            self.writer.write(chunk)

    def finish(self) -> ImageFormat:
        """Check the complete upload.

        Raises:
            InvalidField: the size is not the announced one.
            ImageUndecodable: the bytes are not an image of the stated form.
            ImageTooLarge: the image has too many pixels.
        """
        size, header = self.writer.size, self._header
        if header.size and size != header.size:
            raise self._size_mismatch(size)
        if size == 0:
            raise ImageUndecodable("no bytes were sent", field=CHUNK)
        if header.layout is not None:
            check_complete(header.layout, size, CHUNK)
            return header.layout
        return file_type(
            self.writer.view(),
            header.mime_type,
            max_bytes=self._limits.max_bytes,
            max_pixels=self._limits.max_pixels,
            fields=(CHUNK, "header.mime_type"),
        )

    def _take(self, num_bytes: int) -> None:
        if num_bytes > 0:
            self._quota.reserve(self._owner, num_bytes)
            self._taken += num_bytes

    def _size_mismatch(self, actual: int) -> InvalidField:
        return InvalidField(
            f"{self._header.size} bytes were announced, {actual} sent",
            field="header.size_bytes",
            limit=self._header.size,
            actual=actual,
        )
