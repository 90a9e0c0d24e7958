"""An image cut into the messages of one PutImage call."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

from legato.v1 import image_pb2, media_pb2

from legato_client._convert.requests import duration

CHUNK_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A header and the bytes it announces; `requests` may be asked for again by a retry."""

    header: image_pb2.PutImageHeader
    data: bytes

    @classmethod
    def of(cls, image: media_pb2.Image, ttl: float | None) -> Upload:
        """The upload of an image that has its bytes; TypeError for one that only names them."""
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
        header.sha256 = hashlib.sha256(data).digest()
        if ttl is not None:
            header.ttl.CopyFrom(duration(ttl))
        return cls(header, data)

    def requests(self) -> Iterator[bytes]:
        """The messages, the header first."""
        yield image_pb2.PutImageRequest(header=self.header).SerializeToString()
        for start in range(0, len(self.data), CHUNK_BYTES):
            chunk = self.data[start : start + CHUNK_BYTES]
            yield image_pb2.PutImageRequest(chunk=chunk).SerializeToString()
