"""An image on its way from its bytes to what the model takes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib

from legato_engine.core.images import EncodedImage, RawImage
from legato_engine.engine.lazy import Lazy
from legato_engine.errors import InvalidField
from legato_engine.images.cache import ImageKey
from legato_engine.images.decoding import image_id
from legato_engine.images.headers import ImageHeader
from legato_engine.models.frontend import PreparedImage


@dataclasses.dataclass(frozen=True, slots=True)
class PreprocessedImage:
    """A prepared image and the seconds that took."""

    image: PreparedImage
    seconds: float


PendingImage = PreprocessedImage | concurrent.futures.Future[PreprocessedImage]
"""An image that is prepared already, or its future."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedImage:
    """The bytes of an image, their content key and, for a file, the header.

    The service has checked it too, but here the limit on pixels bounds allocations.
    """

    tenant: str
    source: EncodedImage | RawImage
    view: memoryview
    key: Lazy[str]
    header: Lazy[ImageHeader]  # raises for `RawImage`

    @property
    def image_id(self) -> str:
        return image_id(self.key.get())

    @property
    def cache_key(self) -> ImageKey:
        return ImageKey(self.tenant, self.image_id)

    @property
    def cost(self) -> int:
        """As `ImageHeader.cost`; raises as `inspect`."""
        if isinstance(self.source, RawImage):
            return self.source.width * self.source.height
        return self.header.get().cost

    def check_sha256(self, expected: str) -> None:
        """Check the hash of the bytes.

        Raises:
            InvalidField: it is another.
        """
        raw = isinstance(self.source, RawImage)  # the key of a file is the hash of its bytes
        actual = hashlib.sha256(self.view).hexdigest() if raw else self.key.get()
        if actual != expected:
            raise InvalidField(
                "sha256 does not match the image bytes", field="sha256", actual=actual
            )
