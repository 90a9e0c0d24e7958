"""Pictures become prepared images, on threads of their own."""

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
from legato_engine.engine.once import Once
from legato_engine.errors import ImageNotFound, InvalidField
from legato_engine.images.cache import ImageCache
from legato_engine.images.decoding import content_key, decode_encoded, image_id, inspect
from legato_engine.images.pixel_memory import PixelMemory, Pixels
from legato_engine.images.raw import check_raw, decode_raw
from legato_engine.images.seen_images import SeenImages
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm.blob_reader import BlobReader

_FEW_BYTES = 512 * 1024  # to hash on the caller's thread


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A prepared image and the seconds it took; `image.info.cache_hit` speaks of this request."""

    image: PreparedImage
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A picture's bytes, and the SHA-256 in hex that they are known by."""

    view: memoryview
    key: Once[str]

    @property
    def name(self) -> str:
        """The picture's id; hashes the bytes unless that was done."""
        return image_id(self.key.get())


class Preprocessor:
    """Decodes, orients, resizes and tiles; a picture seen lately skips all of that."""

    def __init__(
        self,
        frontend: ModelFrontend,
        cache: ImageCache[PreparedImage],
        *,
        blobs: BlobReader,
        max_pixels: int,
        threads: int,
        memory: PixelMemory,
        quick_pixels: int = 0,
    ) -> None:
        """A JPEG or raw picture of at most `quick_pixels` is prepared in a few milliseconds, so
        that its caller may do that itself.
        """
        self._frontend = frontend
        self._cache = cache
        self._blobs = blobs
        self._max_pixels = max_pixels
        self._memory = memory
        self._quick_pixels = quick_pixels
        self._glimpses = SeenImages()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "legato-preprocess")
        self._asked: queue.SimpleQueue[Once[Any] | None] = queue.SimpleQueue()
        self._beside = threading.Thread(target=self._make_asked, name="legato-beside", daemon=True)
        self._beside.start()

    @property
    def images_cached(self) -> int:
        """Pictures that can be named by id."""
        return len(self._cache)

    def find(self, source: ImageSource, *, look_inside: bool) -> Picture | Loaded | None:
        """The picture when it is known already; else its bytes as far as they were looked at.

        An id is looked up, and with `look_inside` bytes are hashed here unless they are many or
        look new: both take less time than another thread needs to wake up. Raises `ImageNotFound`,
        `InvalidField`, `ImageTooLarge` or `InternalError`.
        """
        start = time.monotonic()
        if isinstance(source, CachedImage):
            image = self._named(source.image_id)
            if image is None:
                raise ImageNotFound("no such image, or not any more", resource=source.image_id)
            return Picture(image, time.monotonic() - start)
        if not look_inside or source.blob.size > _FEW_BYTES:
            return None
        loaded = self._load(source)
        image = self._named(loaded.name) if loaded.view in self._glimpses else None
        return loaded if image is None else Picture(image, time.monotonic() - start)

    def start(
        self,
        source: EncodedImage | RawImage,
        loaded: Loaded | None,
        *,
        keep: bool,
        here: bool = False,
        beside: Once[Any] | None = None,
    ) -> Picture | concurrent.futures.Future[Picture]:
        """Prepare `source`, of which `find` has given `loaded`; `keep` lets it be named by id.

        With `here` a picture that was looked at and is quick is prepared on the calling thread,
        while another one hashes it and makes what the caller needs `beside` it: to hand those over
        takes less time than to hand over the picture and take it back. Else what was looked at is
        hashed here beside its decoding. Raises `ImageUndecodable`, `ImageTooLarge`, `InvalidField`
        or `InternalError`, as does the future.
        """
        if loaded is None:
            return self._pool.submit(self._prepare, source, None, keep)
        if here and self._is_quick(source, loaded):
            self._asked.put(loaded.key)
            if beside is not None:
                self._asked.put(beside)
            return self._prepare(source, loaded, keep)
        future = self._pool.submit(self._prepare, source, loaded, keep)
        loaded.key.get()
        return future

    def start_held(
        self, source: EncodedImage | RawImage, sha256: str
    ) -> concurrent.futures.Future[Picture]:
        """Prepare `source` for a caller that wants it held; the cache is the caller's to fill.

        The future raises as that of `start`, and `InvalidField` when `sha256`, unless empty, is not
        that of the bytes.
        """
        return self._pool.submit(self._prepare_held, source, sha256)

    def close(self) -> None:
        """Drop what has not begun and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._asked.put(None)
        self._beside.join()

    def _prepare(
        self, source: EncodedImage | RawImage, loaded: Loaded | None, keep: bool
    ) -> Picture:
        start = time.monotonic()
        if loaded is None:
            loaded = self._load(source)
            loaded.key.get()
        known = self._named(loaded.name) if loaded.key.made else None  # else it looked new
        image = known or self._make(source, loaded, keep)
        return Picture(image, time.monotonic() - start)

    def _prepare_held(self, source: EncodedImage | RawImage, sha256: str) -> Picture:
        loaded = self._load(source)
        key = loaded.key.get()
        if sha256:
            raw = isinstance(source, RawImage)  # of a file, the hash is what it is known by
            actual = hashlib.sha256(loaded.view).hexdigest() if raw else key
            if actual != sha256:
                raise InvalidField("not the hash of the bytes", field="sha256", actual=actual)
        return self._prepare(source, loaded, keep=False)

    def _make_asked(self) -> None:
        """Runs on the thread beside, which holds nothing while it waits for more."""
        while (asked := self._asked.get()) is not None:
            with contextlib.suppress(Exception):  # which the one who needs it meets again
                asked.get()
            del asked

    def _is_quick(self, source: EncodedImage | RawImage, loaded: Loaded) -> bool:
        if isinstance(source, RawImage):
            return source.width * source.height <= self._quick_pixels
        if not self._quick_pixels or source.mime_type != "image/jpeg":
            return False
        header = inspect(loaded.view, max_pixels=self._max_pixels, max_bytes=source.blob.size)
        return header.width * header.height <= self._quick_pixels

    def _named(self, name: str) -> PreparedImage | None:
        """The picture of this id as a hit."""
        image = self._cache.get(name)
        if image is None:
            return None
        info = msgspec.structs.replace(image.info, cache_hit=True)
        return dataclasses.replace(image, info=info)

    def _load(self, source: EncodedImage | RawImage) -> Loaded:
        """Take the blob, once."""
        raw = source if isinstance(source, RawImage) else None
        if raw is not None:
            check_raw(raw, max_pixels=self._max_pixels)
        view = self._blobs.take(source.blob)
        return Loaded(view, Once(functools.partial(content_key, view, raw)))

    def _make(self, source: EncodedImage | RawImage, loaded: Loaded, keep: bool) -> PreparedImage:
        pixels_HWC = self._decode(loaded.view, source)
        height, width = pixels_HWC.shape[:2]
        info = ImageInfo(image_id=loaded.name, width=width, height=height, cache_hit=False)
        image = self._frontend.prepare_image(pixels_HWC, loaded.key.get(), info)
        self._glimpses.add(loaded.view)
        if keep:
            self._cache.put(loaded.name, image, image.num_bytes)
        return image

    def _decode(self, view: memoryview, source: EncodedImage | RawImage) -> Pixels:
        if isinstance(source, RawImage):
            return decode_raw(view, source, self._memory.take)
        return decode_encoded(view, max_pixels=self._max_pixels, take=self._memory.take)
