"""Pictures on their way in: checked by their headers, then staged in shared memory."""

from __future__ import annotations

import asyncio
import dataclasses

from legato.v1 import media_pb2
from legato_engine import core, raw_images
from legato_engine.blobs import BlobStore
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InvalidField, InvalidRequest
from legato_engine.images import ImageHeader, inspect

from legato_service.errors import SharedMemoryRefused

_GLANCE = 4096  # bytes that the event loop reads itself
_FORMATS = {
    media_pb2.PIXEL_FORMAT_RGB8: core.PixelFormat.RGB8,
    media_pb2.PIXEL_FORMAT_BGR8: core.PixelFormat.BGR8,
    media_pb2.PIXEL_FORMAT_RGBA8: core.PixelFormat.RGBA8,
    media_pb2.PIXEL_FORMAT_BGRA8: core.PixelFormat.BGRA8,
    media_pb2.PIXEL_FORMAT_MONO8: core.PixelFormat.MONO8,
    media_pb2.PIXEL_FORMAT_NV12: core.PixelFormat.NV12,
    media_pb2.PIXEL_FORMAT_YUYV: core.PixelFormat.YUYV,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Shape of raw pixels, checked against their bytes."""

    width: int
    height: int
    row_stride: int
    format: core.PixelFormat


@dataclasses.dataclass(frozen=True, slots=True)
class InlinePicture:
    """Bytes that came with the request: a file of type `form`, or pixels laid out as `form`."""

    data: bytes
    form: str | Layout

    @property
    def field(self) -> str:
        """The request's field that holds the bytes."""
        return "image.encoded.data" if isinstance(self.form, str) else "image.raw.data"

    def source(self, blob: core.BlobRef) -> core.ImageSource:
        """The picture, its bytes being in `blob`."""
        if isinstance(self.form, str):
            return core.EncodedImage(blob=blob, mime_type=self.form)
        return core.RawImage(
            blob=blob,
            width=self.form.width,
            height=self.form.height,
            row_stride=self.form.row_stride,
            format=self.form.format,
        )


Picture = InlinePicture | core.CachedImage | None
"""A picture that passed its checks, or none."""


class PictureIntake:
    """Checks pictures against the limits and stages their bytes for the engine."""

    def __init__(self, blobs: BlobStore, *, max_bytes: int, max_pixels: int) -> None:
        self._blobs = blobs
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels

    async def check(self, image: media_pb2.Image) -> Picture:
        """The picture of a request's `image` field, a long header read on a worker thread.

        Raises `InvalidField`, `ImageUndecodable`, `ImageTooLarge` or `SharedMemoryRefused`.
        """
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
            raise SharedMemoryRefused(
                "shared images are off; send the bytes", region=image.shared.region
            )
        return None

    def stage(self, picture: Picture) -> core.ImageSource | None:
        """The picture as the engine reads it; its blob is for `Engine.submit` to discard."""
        if not isinstance(picture, InlinePicture):
            return picture
        return picture.source(self._blobs.put(picture.data))

    async def _encoded(self, encoded: media_pb2.EncodedImage) -> InlinePicture:
        data = encoded.data  # every access copies the bytes
        try:
            header = self._glance(data)
            if header is None:
                header = await asyncio.to_thread(
                    inspect, data, max_pixels=self._max_pixels, max_bytes=self._max_bytes
                )
        except InvalidRequest as error:
            error.metadata["field"] = "image.encoded.data"
            raise
        stated = encoded.mime_type.lower()
        if stated and stated != header.mime_type:
            raise ImageUndecodable(
                f"the bytes are {header.mime_type}",
                field="image.encoded.mime_type",
                stated=encoded.mime_type,
                actual=header.mime_type,
            )
        return InlinePicture(data, header.mime_type)

    def _glance(self, data: bytes) -> ImageHeader | None:
        """The header where it is short, as it mostly is; None where a thread has to look.

        Headers are read from the front, so one that is found in a part is the header of the whole.
        """
        if len(data) > self._max_bytes:
            return None
        part = memoryview(data)[:_GLANCE]
        try:
            return inspect(part, max_pixels=self._max_pixels, max_bytes=self._max_bytes)
        except ImageUndecodable:
            return None

    def _raw(self, raw: media_pb2.RawImage) -> InlinePicture:
        data = raw.data  # every access copies the bytes
        layout = _layout(raw.layout)
        pixels = layout.width * layout.height
        for actual, limit, unit in (
            (pixels, self._max_pixels, "pixels"),
            (len(data), self._max_bytes, "bytes"),
        ):
            if actual > limit:
                raise ImageTooLarge(
                    f"the image has {actual} {unit}, the limit is {limit}",
                    field="image.raw",
                    limit=limit,
                    actual=actual,
                    unit=unit,
                )
        needed = raw_images.num_bytes(layout.format, layout.width, layout.height, layout.row_stride)
        if len(data) < needed:
            raise ImageUndecodable(
                f"{needed} bytes needed, {len(data)} given",
                field="image.raw.data",
                limit=needed,
                actual=len(data),
            )
        return InlinePicture(data, layout)


def _layout(message: media_pb2.PixelLayout) -> Layout:
    at = "image.raw.layout"
    if message.format not in _FORMATS:
        known = ", ".join(form.name for form in core.PixelFormat)
        raise InvalidField(f"one of {known}; this server reads no others", field=f"{at}.format")
    form = _FORMATS[message.format]
    stride = message.row_stride_bytes or raw_images.row_bytes(form, message.width)
    try:
        raw_images.check_layout(form, message.width, message.height, stride)
    except InvalidField as error:
        error.metadata["field"] = f"{at}.{error.metadata['field']}"
        raise
    return Layout(message.width, message.height, stride, form)
