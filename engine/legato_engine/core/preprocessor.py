"""Preparation of images on threads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from legato_engine.errors import ImageNotFound, ImageTooLarge, InvalidField, LegatoError
from legato_engine.images.cache import ImageCache, ImageKey, SeenImages
from legato_engine.images.decoding import (
    DecodeJpeg,
    content_key,
    decode_baseline,
    decode_by_libjpeg,
    image_id,
)
from legato_engine.images.decoding_workers import DecodingWorkers
from legato_engine.images.headers import ImageHeader, displayed_size, inspect
from legato_engine.images.memory import PixelMemory, Pixels
from legato_engine.images.raw import check_raw, decode_raw
from legato_engine.ipc.messages import ImageTotals
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm import BlobReader
from legato_engine.types import CachedImageRef, EncodedImage, ImageProperties, ImageSource, RawImage

T = TypeVar("T")


class Lazy(Generic[T]):
    """Lazily computed value: the first `get` runs `compute` while others wait."""

    __slots__ = ("_compute", "_lock", "_value")

    def __init__(self, compute: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._compute: Callable[[], T] | None = compute
        self._value: T | None = None

    @property
    def is_computed(self) -> bool:
        return self._compute is None

    def get(self) -> T:
        with self._lock:
            if self._compute is not None:
                self._value = self._compute()
                self._compute = None
            return cast("T", self._value)


# ---------------------------------------------------------------- preparation pool


class PreparationPool:
    """Pool of threads that prepare images, and of processes that decode for them.

    A pool keeps its images in order; they do not wait for those of another pool.
    """

    def __init__(self, name: str, threads: int, *, max_pixels: int, nice: int = 0) -> None:
        self.threads = concurrent.futures.ThreadPoolExecutor(threads, f"legato-{name}")
        self.workers = DecodingWorkers(max_pixels=max_pixels, nice=nice)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.workers.close()
        self.threads.shutdown(wait=True)


# ---------------------------------------------------------------- loaded image


@dataclasses.dataclass(frozen=True, slots=True)
class PreprocessedImage:
    """A prepared image and its preparation time in seconds."""

    image: PreparedImage
    seconds: float

    @property
    def size(self) -> tuple[int, int]:
        return self.image.info.width, self.image.info.height


PendingImage = PreprocessedImage | concurrent.futures.Future[PreprocessedImage]
"""A prepared image, or its future."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedImage:
    """Bytes of an image with their content key and, for a file, the header.

    The service has checked the header, too; here the limit on pixels bounds allocations.
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
    def is_small(self) -> bool:
        """Return whether the bytes are hashed faster than another thread wakes."""
        return len(self.view) <= _MAX_INLINE_BYTES

    @property
    def size(self) -> tuple[int, int]:
        """Return the width and height, after EXIF orientation; raise as `inspect` does."""
        if isinstance(self.source, RawImage):
            return self.source.width, self.source.height
        return displayed_size(self.view, self.header.get())

    @property
    def cost(self) -> int:
        """Return `ImageHeader.cost`; raise as `inspect` does."""
        if isinstance(self.source, RawImage):
            return self.source.width * self.source.height
        return self.header.get().cost

    def check_sha256(self, expected: str) -> None:
        """Check the hash of the bytes.

        Raises:
            InvalidField: the hash differs.
        """
        raw = isinstance(self.source, RawImage)  # the key of a file is the hash of its bytes
        actual = hashlib.sha256(self.view).hexdigest() if raw else self.key.get()
        if actual != expected:
            raise InvalidField(
                "sha256 does not match the image bytes", field="sha256", actual=actual
            )


# ---------------------------------------------------------------- preprocessor

_MAX_INLINE_BYTES = 512 * 1024  # hashed on the calling thread
_LIGHT_COST = 4 * 1024 * 1024  # pixels of a baseline JPEG: about 30 ms
_MAX_IMAGES_OF_REQUEST = 8
"""Largest images whose pixels one request may have decoded: 32 frames of 4K."""

_HEAVY_NICE = 10  # heavy images yield the cores to other work


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """An image on its way through the pools."""

    source: EncodedImage | RawImage
    loaded: LoadedImage | None
    tenant: str
    keep: bool
    sha256: str = ""
    seconds: float = 0.0  # spent in earlier pools
    future: concurrent.futures.Future[PreprocessedImage] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )

    def fail(self, error: BaseException) -> None:
        if isinstance(error, LegatoError):
            error = error.with_traceback(None)  # its frames reference the image and the future
        if self.future.running() or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Preprocessor:
    """Preprocessor: decodes, orients, resizes and tiles images not cached for their tenant."""

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
        decode_jpeg: DecodeJpeg = decode_by_libjpeg,
    ) -> None:
        """Create a preprocessor; up to `max_inline_pixels`, images are decoded inline."""
        self._frontend = frontend
        self._cache = cache
        self._blobs = blobs
        self._max_pixels = max_pixels
        self._memory = memory
        self._max_inline_pixels = max_inline_pixels
        self._decode_jpeg = decode_jpeg
        self._seen = SeenImages()
        self._light = PreparationPool("preprocess", threads, max_pixels=max_pixels)
        self._heavy = PreparationPool(
            "preprocess-heavy", threads, max_pixels=max_pixels, nice=_HEAVY_NICE
        )
        self._count_lock = threading.Lock()
        self._num_decoded = 0
        self._num_found = 0
        self._prefetcher = concurrent.futures.ThreadPoolExecutor(1, "legato-prefetch")

    @property
    def images_cached(self) -> int:
        return len(self._cache)

    @property
    def totals(self) -> ImageTotals:
        """Return the image totals without `held_bytes`."""
        return ImageTotals(
            decoded=self._num_decoded, found=self._num_found, cached_bytes=self._cache.num_bytes
        )

    def find(
        self, source: ImageSource, *, tenant: str, may_hash: bool, loads: bool = False
    ) -> PreprocessedImage | LoadedImage | None:
        """Return the cached image, its bytes if they were loaded, or None.

        With `may_hash`, a small image is hashed if it may have been seen: that is faster than
        waking another thread. With `loads` the bytes of an image that is not hashed are loaded.

        Raises:
            ImageNotFound: no image of this id is cached.
            InvalidField, ImageTooLarge: the layout of a raw image is wrong.
            InternalError: the blob cannot be read.
        """
        start = time.monotonic()
        if isinstance(source, CachedImageRef):
            image = self._cached(ImageKey(tenant, source.image_id))
            if image is None:
                raise ImageNotFound("image not found or expired", resource=source.image_id)
            return PreprocessedImage(image, time.monotonic() - start)
        if not may_hash or source.blob.size > _MAX_INLINE_BYTES:
            return self._load(source, tenant) if loads else None
        loaded = self._load(source, tenant)
        seen = self._seen.has(tenant, loaded.view)
        image = self._cached(loaded.cache_key) if seen else None
        return loaded if image is None else PreprocessedImage(image, time.monotonic() - start)

    def check_pixels(self, found: Sequence[PreprocessedImage | LoadedImage | None]) -> None:
        """Check the pixels that are to be decoded for one request, by the images' headers.

        Raises:
            ImageTooLarge: there are too many.
        """
        limit = _MAX_IMAGES_OF_REQUEST * self._max_pixels
        sizes = [each.size for each in found if isinstance(each, LoadedImage)]
        actual = sum(width * height for width, height in sizes)
        if actual > limit:
            raise ImageTooLarge(
                f"the images have {actual} pixels together, the limit is {limit}",
                field="images",
                limit=limit,
                actual=actual,
                unit="pixels",
            )

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
        if loaded is not None and inline and self._fits_inline(loaded):
            for value in (loaded.key, prefetch):
                if value is not None:
                    self._prefetcher.submit(value.get)  # an error is raised again at its use
            start = time.monotonic()
            pixels_HWC = self._decode_here(loaded)
            if pixels_HWC is not None:  # else it may be corrupt
                image = self._prepare(loaded, pixels_HWC, keep)
                return PreprocessedImage(image, time.monotonic() - start)
        job = _Job(source, loaded, tenant, keep)
        self._light.threads.submit(self._run, job, self._light)
        if loaded is not None and loaded.is_small:
            loaded.key.get()
        return job.future

    def start_lease(
        self, source: EncodedImage | RawImage, tenant: str, sha256: str
    ) -> concurrent.futures.Future[PreprocessedImage]:
        """Prepare `source` without caching it.

        The future raises as that of `start`, and `InvalidField` for another non-empty `sha256`.
        """
        job = _Job(source, None, tenant, keep=False, sha256=sha256)
        self._light.threads.submit(self._run, job, self._light)
        return job.future

    def warm_up(self) -> None:
        """Start a decoding process ahead of the first image that needs one; do not wait."""
        self._light.workers.start(1)

    def close(self) -> None:
        self._light.close()
        self._heavy.close()
        self._prefetcher.shutdown()

    # ------------------------------------------------------------ on a pool's thread

    def _run(self, job: _Job, pool: PreparationPool) -> None:
        """Complete the job's future, or pass a heavy image on."""
        if job.future.cancelled():
            return
        start = time.monotonic()
        try:
            loaded = self._loaded(job)
            # An image without a key is new, so it cannot be cached.
            cached = self._cached(loaded.cache_key) if loaded.key.is_computed else None
            if cached is None and pool is self._light and loaded.cost > _LIGHT_COST:
                job.seconds = time.monotonic() - start
                self._heavy.threads.submit(self._run, job, self._heavy)
                return
            if not job.future.set_running_or_notify_cancel():
                return
            image = cached or self._prepare(loaded, self._decode(loaded, pool), job.keep)
        except BaseException as error:  # noqa: BLE001 - raised again where the image is needed
            job.fail(error)
        else:
            job.future.set_result(PreprocessedImage(image, job.seconds + time.monotonic() - start))

    def _loaded(self, job: _Job) -> LoadedImage:
        if job.loaded is None:
            job.loaded = self._load(job.source, job.tenant)
            job.loaded.key.get()
        elif not job.loaded.is_small:  # else the thread that loaded it hashes it
            job.loaded.key.get()
        if job.sha256:
            job.loaded.check_sha256(job.sha256)
        return job.loaded

    def _decode(self, loaded: LoadedImage, pool: PreparationPool) -> Pixels:
        pixels_HWC = self._decode_here(loaded)
        if pixels_HWC is not None:
            return pixels_HWC
        return pool.workers.decode(loaded.view, loaded.header.get(), self._memory.allocate)

    def _decode_here(self, loaded: LoadedImage) -> Pixels | None:
        """Decode an image that is known to take a few milliseconds.

        Return None for any other, and for a JPEG that may be corrupt.
        """
        if isinstance(loaded.source, RawImage):
            return decode_raw(loaded.view, loaded.source, self._memory.allocate)
        header = loaded.header.get()
        if not header.is_baseline or header.cost > _LIGHT_COST:
            return None
        return decode_baseline(loaded.view, header, self._memory.allocate, self._decode_jpeg)

    def _fits_inline(self, loaded: LoadedImage) -> bool:
        source = loaded.source
        if isinstance(source, RawImage):
            return source.width * source.height <= self._max_inline_pixels
        if not self._max_inline_pixels or source.mime_type != "image/jpeg":
            return False
        header = loaded.header.get()
        return header.is_baseline and header.num_pixels <= self._max_inline_pixels

    def _cached(self, key: ImageKey) -> PreparedImage | None:
        image = self._cache.get(key)
        if image is None:
            return None
        with self._count_lock:
            self._num_found += 1
        info = msgspec.structs.replace(image.info, cache_hit=True)
        return dataclasses.replace(image, info=info)

    def _load(self, source: EncodedImage | RawImage, tenant: str) -> LoadedImage:
        """Read the blob, which can be read only once."""
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

    def _prepare(self, loaded: LoadedImage, pixels_HWC: Pixels, keep: bool) -> PreparedImage:
        height, width = pixels_HWC.shape[:2]
        info = ImageProperties(
            image_id=loaded.image_id, width=width, height=height, cache_hit=False
        )
        image = self._frontend.prepare_image(pixels_HWC, loaded.key.get(), info)
        self._seen.add(loaded.tenant, loaded.view)
        with self._count_lock:
            self._num_decoded += 1
        if keep:
            self._cache.put(loaded.cache_key, image, image.num_bytes)
        return image
