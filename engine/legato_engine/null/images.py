"""Images of an engine without a model: hashed, never decoded."""

from __future__ import annotations

import msgspec

from legato_engine.config import EngineConfig
from legato_engine.core.images import CachedImage, EncodedImage, ImageInfo, ImageSource, RawImage
from legato_engine.errors import ImageNotFound, InvalidField
from legato_engine.images.cache import ImageCache, ImageKey
from legato_engine.images.decoding import content_key, image_id
from legato_engine.images.headers import inspect
from legato_engine.images.leases import ImageLeases
from legato_engine.images.orientation import displayed_size
from legato_engine.images.quota import image_quota
from legato_engine.images.raw import check_raw
from legato_engine.ipc.commands import DropImage, HoldImage
from legato_engine.ipc.figures import ImageTotals
from legato_engine.ipc.messages import ImageHeld
from legato_engine.shm.blob_reader import BlobReader

_RGB = 3  # bytes of a pixel


class NullImages:
    """The cache and the leases of images."""

    def __init__(self, config: EngineConfig, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._max_pixels = config.max_image_pixels
        self._cache = ImageCache[ImageKey, ImageInfo](config.image_cache_bytes)
        self.leases = ImageLeases(self._cache, image_quota(config))
        self._num_loaded = 0
        self._num_found = 0

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def totals(self) -> ImageTotals:
        """An image that is inspected counts as decoded."""
        return ImageTotals(
            decoded=self._num_loaded,
            found=self._num_found,
            cached_bytes=self._cache.num_bytes,
            held_bytes=self.leases.num_bytes,
        )

    def find_or_load(self, source: ImageSource, *, tenant: str, keep: bool) -> ImageInfo:
        """Return an image and take its blob. Raises as `Preprocessor.start`."""
        if isinstance(source, CachedImage):
            cached = self._cached(ImageKey(tenant, source.image_id))
            if cached is None:
                raise ImageNotFound("image not found or expired", resource=source.image_id)
            return cached
        return self._load(source, self._blobs.take(source.blob), tenant=tenant, keep=keep)

    def hold(self, command: HoldImage) -> ImageHeld:
        """Lease an image. Raises as `find_or_load`, and `BytesExceeded`."""
        view = self._blobs.take(command.image.blob)
        if command.sha256 and command.sha256 != (actual := content_key(view)):
            raise InvalidField(
                "sha256 does not match the image bytes", field="sha256", actual=actual
            )
        tenant = command.request_id.tenant
        image = self._load(command.image, view, tenant=tenant, keep=False)
        num_bytes = image.width * image.height * _RGB
        key = ImageKey(tenant, image.image_id)
        until = self.leases.hold(
            key, image, num_bytes, command.owner, command.ttl, command.quota_bytes
        )
        return ImageHeld(request_id=command.request_id, image=image, until=until)

    def drop(self, command: DropImage) -> None:
        """Raises as `ImageLeases.drop`."""
        key = ImageKey(command.request_id.tenant, command.image_id)
        self.leases.drop(key, command.owner)

    def _cached(self, key: ImageKey) -> ImageInfo | None:
        cached = self._cache.get(key)
        if cached is None:
            return None
        self._num_found += 1
        return msgspec.structs.replace(cached, cache_hit=True)

    def _load(
        self, source: EncodedImage | RawImage, view: memoryview, *, tenant: str, keep: bool
    ) -> ImageInfo:
        raw = source if isinstance(source, RawImage) else None
        key = ImageKey(tenant, image_id(content_key(view, raw)))
        if (cached := self._cached(key)) is not None:
            return cached
        if raw is None:
            header = inspect(view, max_pixels=self._max_pixels, max_bytes=len(view))
            width, height = displayed_size(view, header)
        else:
            check_raw(raw, max_pixels=self._max_pixels)
            width, height = raw.width, raw.height
        image = ImageInfo(image_id=key.image_id, width=width, height=height, cache_hit=False)
        self._num_loaded += 1
        if keep:
            self._cache.put(key, image, width * height * _RGB)
        return image
