"""An image cut into the messages of one PutImage call."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

from legato.v1 import image_pb2, media_pb2

from legato_client._convert.pieces import duration

CHUNK_BYTES = 256 * 1024
_ROW_BYTES = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "nv12": 1, "yuyv": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A header and the bytes it announces; a retry calls `requests` again."""

    header: image_pb2.PutImageHeader
    data: bytes
    image_id: str

    @classmethod
    def of(cls, image: media_pb2.Image, ttl: float | None) -> Upload:
        """TypeError for an image without bytes of its own."""
        header = image_pb2.PutImageHeader()
        match image.WhichOneof("source"):
            case "encoded":
                data = image.encoded.data
                header.mime_type = image.encoded.mime_type
            case "raw":
                data = image.raw.data
                header.layout.CopyFrom(image.raw.layout)
            case source:
                raise TypeError(f"only an image's own bytes can be uploaded, got {source}")
        header.size_bytes = len(data)
        digest = hashlib.sha256(data)
        header.sha256 = digest.digest()
        if header.HasField("layout"):
            digest = hashlib.sha256(_layout(header.layout))
            digest.update(data)
        if ttl is not None:
            header.ttl.CopyFrom(duration(ttl))
        return cls(header, data, f"img_{digest.hexdigest()[:32]}")

    def requests(self) -> Iterator[bytes]:
        """The header first."""
        yield image_pb2.PutImageRequest(header=self.header).SerializeToString()
        for start in range(0, len(self.data), CHUNK_BYTES):
            chunk = self.data[start : start + CHUNK_BYTES]
            yield image_pb2.PutImageRequest(chunk=chunk).SerializeToString()


def _layout(layout: media_pb2.PixelLayout) -> bytes:
    """The line that an image id covers before the pixels."""
    name = media_pb2.PixelFormat.Name(layout.format).removeprefix("PIXEL_FORMAT_").lower()
    stride = layout.row_stride_bytes or layout.width * _ROW_BYTES.get(name, 0)
    return f"{name}:{layout.width}x{layout.height}:{stride}\n".encode()
