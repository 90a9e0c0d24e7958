"""Preparation of images on threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import queue
import threading
import time
from typing import Any

import msgspec

from legato_engine.core import CachedImage, EncodedImage, ImageInfo, ImageSource, RawImage
from legato_engine.engine.lazy import Lazy
from legato_engine.errors import ImageNotFound, InvalidField
from legato_engine.images.cache import ImageCache, ImageKey
from legato_engine.images.decoding import (
    ImageHeader,
    content_key,
    decode_file,
    image_id,
    inspect,
)
from legato_engine.images.pixel_memory import PixelMemory, Pixels
from legato_engine.images.raw import check_raw, decode_raw
from legato_engine.images.seen_images import SeenImages
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm.blob_reader import BlobReader

_MAX_INLINE_BYTES = 512 * 1024  # hashed on the calling thread


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


class Preprocessor:
    """Decodes, orients, resizes and tiles images that are not cached for their tenant."""

    def __init__(
        self,
        frontend: ModelFrontend,
        cache: ImageCache[ImageKey, PreparedImage],
        *,
        blobs: BlobReader,
        max_pixels: int,
        threads: int,
        memory: PixelMemory,
        max_inline_pixels: int = 0,
    ) -> None:
        """Up to `max_inline_pixels`, a JPEG or raw image takes only a few milliseconds."""
        self._frontend = frontend
        self._cache = cache
        self._blobs = blobs
        self._max_pixels = max_pixels
        self._memory = memory
        self._max_inline_pixels = max_inline_pixels
        self._seen = SeenImages()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "legato-preprocess")
        self._prefetches: queue.SimpleQueue[Lazy[Any] | None] = queue.SimpleQueue()
        self._prefetcher = threading.Thread(
            target=self._run_prefetches, name="legato-prefetch", daemon=True
        )
        self._prefetcher.start()

    @property
    def images_cached(self) -> int:
        return len(self._cache)

    def find(
        self, source: ImageSource, *, tenant: str, may_hash: bool
    ) -> PreprocessedImage | LoadedImage | None:
        """Return the cached image, its bytes if they were loaded, or None.

        With `may_hash`, a small image is hashed if it may have been seen: that is faster than
        waking another thread.

        Raises:
            ImageNotFound: no image of this id is cached.
            InvalidField, ImageTooLarge: the layout of a raw image is wrong.
            InternalError: the blob cannot be read.
        """
        start = time.monotonic()
        if isinstance(source, CachedImage):
            image = self._cached(ImageKey(tenant, source.image_id))
            if image is None:
                raise ImageNotFound("image not found or expired", resource=source.image_id)
            return PreprocessedImage(image, time.monotonic() - start)
        if not may_hash or source.blob.size > _MAX_INLINE_BYTES:
            return None
        loaded = self._load(source, tenant)
        seen = self._seen.has(tenant, loaded.view)
        image = self._cached(loaded.cache_key) if seen else None
        return loaded if image is None else PreprocessedImage(image, time.monotonic() - start)

    def start(
        self,
        source: EncodedImage | RawImage,
        loaded: LoadedImage | None,
        *,
        tenant: str,
        keep: bool,
        inline: bool = False,
        prefetch: Lazy[Any] | None = None,
    ) -> PendingImage:
        """Prepare `source`, for which `find` returned `loaded`; `keep` adds it to the cache.

        With `inline`, this thread prepares a small loaded image while a helper thread hashes it and
        computes `prefetch`: handing these over is cheaper than the image.

        Raises (or its future does):
            ImageUndecodable, ImageTooLarge, InvalidField: the image is broken or over a limit.
            InternalError: the blob cannot be read.
        """
        if loaded is None:
            return self._pool.submit(self._load_and_prepare, source, tenant, keep)
        if inline and self._fits_inline(loaded):
            self._prefetches.put(loaded.key)
            if prefetch is not None:
                self._prefetches.put(prefetch)
            return self._prepare(loaded, keep)
        future = self._pool.submit(self._prepare, loaded, keep)
        loaded.key.get()
        return future

    def start_lease(
        self, source: EncodedImage | RawImage, tenant: str, sha256: str
    ) -> concurrent.futures.Future[PreprocessedImage]:
        """Prepare `source` without caching it.

        The future raises as that of `start`, and `InvalidField` for another non-empty `sha256`.
        """
        return self._pool.submit(self._prepare_lease, source, tenant, sha256)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._prefetches.put(None)
        self._prefetcher.join()

    def _load_and_prepare(
        self, source: EncodedImage | RawImage, tenant: str, keep: bool
    ) -> PreprocessedImage:
        start = time.monotonic()
        loaded = self._load(source, tenant)
        loaded.key.get()
        return dataclasses.replace(self._prepare(loaded, keep), seconds=time.monotonic() - start)

    def _prepare(self, loaded: LoadedImage, keep: bool) -> PreprocessedImage:
        start = time.monotonic()
        # An image without a key has never been seen, so the cache cannot have it.
        cached = self._cached(loaded.cache_key) if loaded.key.is_computed else None
        image = cached or self._decode_and_prepare(loaded, keep)
        return PreprocessedImage(image, time.monotonic() - start)

    def _prepare_lease(
        self, source: EncodedImage | RawImage, tenant: str, sha256: str
    ) -> PreprocessedImage:
        loaded = self._load(source, tenant)
        key = loaded.key.get()
        if sha256:
            raw = isinstance(source, RawImage)  # the key of a file is the hash of its bytes
            actual = hashlib.sha256(loaded.view).hexdigest() if raw else key
            if actual != sha256:
                raise InvalidField(
                    "sha256 does not match the image bytes", field="sha256", actual=actual
                )
        return self._prepare(loaded, keep=False)

    def _run_prefetches(self) -> None:
        while (value := self._prefetches.get()) is not None:
            with contextlib.suppress(Exception):  # raised again where the value is needed
                value.get()
            del value  # not kept alive while the thread waits

    def _fits_inline(self, loaded: LoadedImage) -> bool:
        source = loaded.source
        if isinstance(source, RawImage):
            return source.width * source.height <= self._max_inline_pixels
        if not self._max_inline_pixels or source.mime_type != "image/jpeg":
            return False
        header = loaded.header.get()
        return header.width * header.height <= self._max_inline_pixels

    def _cached(self, key: ImageKey) -> PreparedImage | None:
        image = self._cache.get(key)
        if image is None:
            return None
        info = msgspec.structs.replace(image.info, cache_hit=True)
        return dataclasses.replace(image, info=info)

    def _load(self, source: EncodedImage | RawImage, tenant: str) -> LoadedImage:
        """Take the blob, which can be taken once."""
        raw = source if isinstance(source, RawImage) else None
        if raw is not None:
            check_raw(raw, max_pixels=self._max_pixels)
        view = self._blobs.take(source.blob)
        return LoadedImage(
            tenant,
            source,
            view,
            key=Lazy(functools.partial(content_key, view, raw)),
            header=Lazy(
                functools.partial(
                    inspect, view, max_pixels=self._max_pixels, max_bytes=source.blob.size
                )
            ),
        )

    def _decode_and_prepare(self, loaded: LoadedImage, keep: bool) -> PreparedImage:
        pixels_HWC = self._decode(loaded)
        height, width = pixels_HWC.shape[:2]
        info = ImageInfo(image_id=loaded.image_id, width=width, height=height, cache_hit=False)
        image = self._frontend.prepare_image(pixels_HWC, loaded.key.get(), info)
        self._seen.add(loaded.tenant, loaded.view)
        if keep:
            self._cache.put(loaded.cache_key, image, image.num_bytes)
        return image

    def _decode(self, loaded: LoadedImage) -> Pixels:
        if isinstance(loaded.source, RawImage):
            return decode_raw(loaded.view, loaded.source, self._memory.allocate)
        return decode_file(loaded.view, loaded.header.get(), self._memory.allocate)
