"""Intake of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import msgspec
from legato.v1 import media_pb2
from legato_engine.core.images import BlobRef, CachedImage, EncodedImage, ImageSource, RawImage
from legato_engine.errors import ImageTooLarge, InvalidField
from legato_engine.shm.blob_store import BlobStore, BlobWriter

from legato_service.access.method_scopes import SHARED_IMAGES
from legato_service.errors import Forbidden, SharedMemoryRefused
from legato_service.images.headers import file_type
from legato_service.images.pixel_layout import Layout, check_complete, check_size, read_layout
from legato_service.images.pixel_quota import take_pixels
from legato_service.rpc.call import CURRENT

ImageFormat = str | Layout
"""The MIME type of a file, or the layout of raw pixels."""


class InlineImage(msgspec.Struct, frozen=True):
    """Bytes that came with the request."""

    data: bytes
    format: ImageFormat

    @property
    def field(self) -> str:
        return "image.encoded.data" if isinstance(self.format, str) else "image.raw.data"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StagedImage:
    """Bytes in shared memory, freed with the last reference to this."""

    writer: BlobWriter
    format: ImageFormat
    field: str


NewImage = InlineImage | StagedImage
"""An image that the engine may not have."""

CheckedImage = NewImage | CachedImage | None
"""The image of a request, if any, within the limits."""


ReadShared = Callable[[media_pb2.SharedImage], Awaitable[StagedImage]]
"""The type of `shared_memory.SharedMemory.read`."""


def stage(image: CheckedImage, blobs: BlobStore) -> ImageSource | None:
    """Stage the bytes in the store of an engine; its `submit` discards the blob."""
    match image:
        case InlineImage():
            return as_source(image.format, blobs.put(image.data))
        case StagedImage():
            return as_source(image.format, image.writer.publish(blobs))
    return image


def as_source(image_format: ImageFormat, blob: BlobRef) -> EncodedImage | RawImage:
    if isinstance(image_format, str):
        return EncodedImage(blob=blob, mime_type=image_format)
    return RawImage(
        blob=blob,
        width=image_format.width,
        height=image_format.height,
        row_stride=image_format.row_stride,
        format=image_format.format,
    )


class ImageIntake:
    """Checks images against the limits."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_pixels: int,
        read_shared: ReadShared | None = None,
    ) -> None:
        self._read_shared = read_shared
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels

    async def check(self, image: media_pb2.Image) -> CheckedImage:
        """Check the image of a request, if any.

        Raises:
            InvalidField: a field is malformed.
            ImageUndecodable: the bytes are not an image of the stated form.
            ImageTooLarge: the image has too many bytes or pixels.
            QuotaExceeded: the caller has sent too many pixels.
            Forbidden: the credential lacks the scope to name regions of shared memory.
            SharedMemoryRefused: its region must not be read.
            SharedMemoryTorn: its slot was written meanwhile.
        """
        match image.WhichOneof("source"):
            case "encoded":
                return self._encoded(image.encoded)
            case "raw":
                return self._raw(image.raw)
            case "image_id":
                if not image.image_id:
                    raise InvalidField("must not be empty", field="image.image_id")
                return CachedImage(image_id=image.image_id)
            case "shared":
                if self._read_shared is None:
                    raise SharedMemoryRefused(
                        "shared images are off; send the bytes", region=image.shared.region
                    )
                _check_may_share()
                return await self._read_shared(image.shared)
            case None:
                return None

    def _encoded(self, encoded: media_pb2.EncodedImage) -> InlineImage:
        data = encoded.data  # every access copies the bytes
        self._check_carried(len(data), "image.encoded.data")
        mime_type = file_type(
            data,
            encoded.mime_type,
            max_bytes=self._max_bytes,
            max_pixels=self._max_pixels,
            fields=("image.encoded.data", "image.encoded.mime_type"),
        )
        return InlineImage(data, mime_type)

    def _raw(self, raw: media_pb2.RawImage) -> InlineImage:
        data = raw.data  # every access copies the bytes
        layout = read_layout(raw.layout, "image.raw.layout")
        check_size(layout.width * layout.height, self._max_pixels, "pixels", "image.raw")
        self._check_carried(len(data), "image.raw")
        check_complete(layout, len(data), "image.raw.data")
        take_pixels(layout.width, layout.height)
        return InlineImage(data, layout)

    def _check_carried(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._max_bytes:
            raise ImageTooLarge(
                f"the image has {num_bytes} bytes, a request carries up to {self._max_bytes}: "
                "upload it with PutImage",
                field=field,
                limit=self._max_bytes,
                actual=num_bytes,
                unit="bytes",
            )


def _check_may_share() -> None:
    """A region is read as the server's own user, whichever tenant wrote it."""
    rpc = CURRENT.get(None)
    if rpc is None or rpc.principal is None or SHARED_IMAGES in rpc.principal.scopes:
        return
    raise Forbidden(f"the credential lacks the scope {SHARED_IMAGES}", scope=SHARED_IMAGES)
