"""Pictures for an engine that looks at none of them: taken, hashed and sized, never decoded."""

from __future__ import annotations

import msgspec

from legato_engine.config import EngineConfig
from legato_engine.core import CachedImage, ImageInfo, ImageSource, RawImage
from legato_engine.errors import ImageNotFound, InvalidField
from legato_engine.images.cache import ImageCache
from legato_engine.images.decoding import content_key, displayed_size, image_id
from legato_engine.images.leases import ImageLeases
from legato_engine.images.quota import image_quota
from legato_engine.images.raw import check_raw
from legato_engine.ipc.messages import HoldImage, ImageHeld
from legato_engine.shm.blob_reader import BlobReader

_RGB = 3  # bytes of a pixel, as a picture counts against the cache


class NullImages:
    """What is known of pictures by their ids; those seen lately are hits, as with a real model."""

    def __init__(self, config: EngineConfig, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._max_pixels = config.max_image_pixels
        self._known = ImageCache[ImageInfo](config.image_cache_bytes)
        self.holds = ImageLeases(self._known, image_quota(config))

    def __len__(self) -> int:
        """Pictures that can be named by id."""
        return len(self._known)

    def take(self, source: ImageSource | None, *, keep: bool) -> ImageInfo | None:
        """The picture of a request, its blob taken; `keep` lets it be named by id later.

        Raises `ImageNotFound`, `ImageUndecodable`, `ImageTooLarge`, `InvalidField` or
        `InternalError`.
        """
        if source is None:
            return None
        if isinstance(source, CachedImage):
            found = self._hit(source.image_id)
            if found is None:
                raise ImageNotFound("no such image, or not any more", resource=source.image_id)
            return found
        raw = source if isinstance(source, RawImage) else None
        view = self._blobs.take(source.blob)
        name = image_id(content_key(view, raw))
        return self._hit(name) or self._sized(name, view, raw, keep=keep)

    def hold(self, command: HoldImage) -> ImageHeld:
        """Hold a picture. Raises as `take`, and `BytesExceeded`."""
        raw = command.image if isinstance(command.image, RawImage) else None
        view = self._blobs.take(command.image.blob)
        if command.sha256 not in ("", content_key(view)):
            raise InvalidField("not the hash of the bytes", field="sha256")
        name = image_id(content_key(view, raw))
        image = self._hit(name) or self._sized(name, view, raw, keep=False)
        num_bytes = image.width * image.height * _RGB
        until = self.holds.hold(name, image, num_bytes, command.owner, command.ttl)
        return ImageHeld(request_id=command.request_id, image=image, until=until)

    def _hit(self, name: str) -> ImageInfo | None:
        found = self._known.get(name)
        return found and msgspec.structs.replace(found, cache_hit=True)

    def _sized(self, name: str, view: memoryview, raw: RawImage | None, *, keep: bool) -> ImageInfo:
        if raw is None:
            width, height = displayed_size(view, max_pixels=self._max_pixels)
        else:
            check_raw(raw, max_pixels=self._max_pixels)
            width, height = raw.width, raw.height
        image = ImageInfo(image_id=name, width=width, height=height, cache_hit=False)
        if keep:
            self._known.put(name, image, width * height * _RGB)
        return image
