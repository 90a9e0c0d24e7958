"""Pictures on their way in: checked by their headers, then staged in shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import msgspec
from legato.v1 import media_pb2
from legato_engine import core
from legato_engine.errors import InvalidField
from legato_engine.shm.blob_store import BlobStore, BlobWriter

from legato_service.errors import SharedMemoryRefused
from legato_service.images.headers import file_type
from legato_service.images.pixel_layout import Layout, check_complete, check_size, read_layout

Form = str | Layout
"""How a picture's bytes are to be read: a file of this type, or pixels laid out so."""


class InlineImage(msgspec.Struct, frozen=True):
    """Bytes that came with the request."""

    data: bytes
    form: Form

    @property
    def field(self) -> str:
        """The request's field that holds the bytes."""
        return "image.encoded.data" if isinstance(self.form, str) else "image.raw.data"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StagedImage:
    """Bytes that are in shared memory already; they go with the last reference to this."""

    draft: BlobWriter
    form: Form
    field: str


NewPicture = InlineImage | StagedImage
"""A picture that the engine may not have seen yet."""

Picture = NewPicture | core.CachedImage | None
"""A picture that passed its checks, or none."""


ReadShared = Callable[[media_pb2.SharedImage], Awaitable[StagedImage]]
"""How frames in shared memory come in: `shared_memory.SharedMemory.read`."""


def as_source(form: Form, blob: core.BlobRef) -> core.EncodedImage | core.RawImage:
    """The picture as the engine reads it, its bytes being in `blob`."""
    if isinstance(form, str):
        return core.EncodedImage(blob=blob, mime_type=form)
    return core.RawImage(
        blob=blob,
        width=form.width,
        height=form.height,
        row_stride=form.row_stride,
        format=form.format,
    )


class ImageIntake:
    """Checks pictures against the limits and stages their bytes for the engine.

    Without `read_shared`, pictures in shared memory are refused.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        max_bytes: int,
        max_pixels: int,
        read_shared: ReadShared | None = None,
    ) -> None:
        self._blobs = blobs
        self._read_shared = read_shared
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels

    async def check(self, image: media_pb2.Image | None) -> Picture:
        """The picture of a request's `image` field, a long header read on a worker thread.

        None where there is none.

        Raises `InvalidField`, `ImageUndecodable`, `ImageTooLarge`, `SharedMemoryRefused` or
        `SharedMemoryTorn`.
        """
        if image is None:
            return None
        source = image.WhichOneof("source")
        if source == "encoded":
            return await self._encoded(image.encoded)
        if source == "raw":
            return self._raw(image.raw)
        if source == "image_id":
            if not image.image_id:
                raise InvalidField("must not be empty", field="image.image_id")
            return core.CachedImage(image_id=image.image_id)
        if source == "shared":
            if self._read_shared is None:
                raise SharedMemoryRefused(
                    "shared images are off; send the bytes", region=image.shared.region
                )
            return await self._read_shared(image.shared)
        return None

    def stage(self, picture: Picture) -> core.ImageSource | None:
        """The picture as the engine reads it; its blob is for `Engine.submit` to discard."""
        match picture:
            case InlineImage():
                return as_source(picture.form, self._blobs.put(picture.data))
            case StagedImage():
                return as_source(picture.form, picture.draft.publish())
        return picture

    async def _encoded(self, encoded: media_pb2.EncodedImage) -> InlineImage:
        data = encoded.data  # every access copies the bytes
        kind = await file_type(
            data,
            encoded.mime_type,
            max_bytes=self._max_bytes,
            max_pixels=self._max_pixels,
            fields=("image.encoded.data", "image.encoded.mime_type"),
        )
        return InlineImage(data, kind)

    def _raw(self, raw: media_pb2.RawImage) -> InlineImage:
        data = raw.data  # every access copies the bytes
        layout = read_layout(raw.layout, "image.raw.layout")
        check_size(layout.width * layout.height, self._max_pixels, "pixels", "image.raw")
        check_size(len(data), self._max_bytes, "bytes", "image.raw")
        check_complete(layout, len(data), "image.raw.data")
        return InlineImage(data, layout)
