"""Pictures become prepared images, on threads of their own."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time

import msgspec
from PIL import Image

from legato_engine.blobs import take_blob
from legato_engine.core import CachedImage, EncodedImage, ImageInfo, ImageSource, RawImage
from legato_engine.errors import ImageNotFound
from legato_engine.image_cache import ImageCache
from legato_engine.images import check_raw, content_key, decode_encoded, decode_raw, image_id
from legato_engine.models.model import ModelFrontend, PreparedImage


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A prepared image and the seconds it took; `image.info.cache_hit` speaks of this request."""

    image: PreparedImage
    seconds: float


class Preprocessor:
    """Decodes, orients, resizes and tiles; a picture seen lately skips all of that."""

    def __init__(
        self,
        frontend: ModelFrontend,
        cache: ImageCache[PreparedImage],
        *,
        namespace: str,
        max_pixels: int,
        threads: int,
    ) -> None:
        self._frontend = frontend
        self._cache = cache
        self._namespace = namespace
        self._max_pixels = max_pixels
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "legato-preprocess")

    @property
    def images_cached(self) -> int:
        """Pictures that can be named by id."""
        return len(self._cache)

    def start(self, source: ImageSource, *, keep: bool) -> concurrent.futures.Future[Picture]:
        """Prepare `source`; `keep` lets it be named by id later.

        The future raises `ImageNotFound`, `ImageUndecodable`, `ImageTooLarge` or `InvalidField`.
        """
        return self._pool.submit(self._prepare, source, keep)

    def close(self) -> None:
        """Drop what has not begun and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, source: ImageSource, keep: bool) -> Picture:
        start = time.monotonic()
        image = self._find_or_make(source, keep)
        return Picture(image, time.monotonic() - start)

    def _find_or_make(self, source: ImageSource, keep: bool) -> PreparedImage:
        if isinstance(source, CachedImage):
            cached = self._cache.get(source.image_id)
            if cached is None:
                raise ImageNotFound("no such image, or not any more", resource=source.image_id)
            return _as_hit(cached)
        if isinstance(source, RawImage):
            check_raw(source, max_pixels=self._max_pixels)
        view = take_blob(source.blob, self._namespace)
        key = content_key(view, source if isinstance(source, RawImage) else None)
        name = image_id(key)
        cached = self._cache.get(name)
        if cached is not None:
            return _as_hit(cached)
        rgb = self._decode(view, source)
        info = ImageInfo(image_id=name, width=rgb.width, height=rgb.height, cache_hit=False)
        image = self._frontend.prepare_image(rgb, key, info)
        if keep:
            self._cache.put(name, image, image.num_bytes)
        return image

    def _decode(self, view: memoryview, source: EncodedImage | RawImage) -> Image.Image:
        if isinstance(source, RawImage):
            return decode_raw(view, source)
        return decode_encoded(view, max_pixels=self._max_pixels)


def _as_hit(image: PreparedImage) -> PreparedImage:
    return dataclasses.replace(image, info=msgspec.structs.replace(image.info, cache_hit=True))
