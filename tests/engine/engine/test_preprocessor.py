"""Preparation of images, on threads and inline."""

import io
import threading
from typing import Any, cast

import numpy as np
import pytest
from legato_engine.core import preprocessor
from legato_engine.core.preprocessor import Lazy, LoadedImage, PreprocessedImage, Preprocessor
from legato_engine.images.cache import ImageCache, ImageKey, SeenImages
from legato_engine.images.decoding import content_key, decode_baseline, image_id
from legato_engine.images.headers import inspect
from legato_engine.images.memory import PixelMemory, host_slab
from legato_engine.models.bundle import ModelFrontend, PreparedImage
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import EncodedImage
from PIL import Image

TIMEOUT = 30.0


class Frontend:
    """A frontend that keeps the pixels as they are."""

    def prepare_image(self, pixels_HWC, key, info):
        """Wrap the pixels."""
        return PreparedImage(key=key, pixels=pixels_HWC, info=info, num_bytes=pixels_HWC.nbytes)


class World:
    """A preprocessor with one thread, and blobs for it."""

    def __init__(self, max_inline_pixels=0):
        self.blobs = BlobStore(new_namespace())
        self.preprocessor = Preprocessor(
            cast(ModelFrontend, Frontend()),
            ImageCache[ImageKey, PreparedImage](1 << 20),
            blobs=BlobReader(self.blobs.namespace),
            max_pixels=10_000,
            threads=1,
            memory=PixelMemory(host_slab(1 << 20)),
            max_inline_pixels=max_inline_pixels,
        )

    def find(self, data, mime_type="image/png"):
        """Put an image into a blob; return its source and what `find` returns in an idle engine."""
        source = EncodedImage(blob=self.blobs.put(data), mime_type=mime_type)
        return source, self.preprocessor.find(source, tenant="", may_hash=True)

    def start(self, data, *, inline, mime_type="image/png", prefetch=None):
        """Start to prepare a new image."""
        source, found = self.find(data, mime_type)
        assert isinstance(found, LoadedImage)
        return self.preprocessor.start(
            source, found, tenant="", keep=True, inline=inline, prefetch=prefetch
        )

    def prepare(self, data: bytes, mime_type: str = "image/png") -> PreprocessedImage:
        """Prepare a new image on a thread."""
        future = self.start(data, inline=False, mime_type=mime_type)
        assert not isinstance(future, PreprocessedImage)
        return cast("PreprocessedImage", future.result(TIMEOUT))

    def close(self):
        """Stop the threads."""
        self.preprocessor.close()
        self.blobs.close()


@pytest.fixture
def world():
    """A world that ends with the test."""
    made = World()
    yield made
    made.close()


def png(seed=0, kind="PNG"):
    """An image of noise, 40 by 30."""
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def hashed_last(monkeypatch):
    """Hashing waits until the image is decoded."""
    decoded = threading.Event()

    def decode(*arguments: Any, **options: Any) -> Any:
        pixels_HWC = decode_baseline(*arguments, **options)
        decoded.set()
        return pixels_HWC

    def hash_behind(*arguments: Any) -> str:
        assert decoded.wait(TIMEOUT)
        return content_key(*arguments)

    monkeypatch.setattr(preprocessor, "decode_baseline", decode)
    monkeypatch.setattr(preprocessor, "content_key", hash_behind)


def test_a_new_image_is_decoded_while_its_bytes_are_hashed(world, hashed_last):
    """Decoding a new image does not wait for its hash."""
    data = png(kind="JPEG")
    assert world.prepare(data, "image/jpeg").image.info.image_id == image_id(content_key(data))


def test_a_small_image_is_prepared_inline(hashed_last):
    """The helper thread hashes it and computes `prefetch` meanwhile."""
    world, data = World(max_inline_pixels=40 * 30), png(kind="JPEG")
    needed = Lazy(threading.get_ident)
    prepared = world.start(data, inline=True, mime_type="image/jpeg", prefetch=needed)
    world.close()
    assert isinstance(prepared, PreprocessedImage)
    assert needed.is_computed
    assert needed.get() != threading.get_ident()
    assert prepared.image.info.image_id == image_id(content_key(data))


def test_a_header_is_read_once(monkeypatch):
    """One read decides both whether an image is small and how it is decoded."""
    reads = []

    def count(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments)
        return inspect(*arguments, **options)

    monkeypatch.setattr(preprocessor, "inspect", count)
    for max_inline_pixels in (0, 40 * 30):
        world = World(max_inline_pixels)
        world.start(png(kind="JPEG"), inline=True, mime_type="image/jpeg")
        world.close()
        assert len(reads) == 1
        reads.clear()


@pytest.mark.parametrize(
    ("max_inline_pixels", "inline", "kind"),
    [(1199, True, "JPEG"), (1200, False, "JPEG"), (1200, True, "PNG")],
)
def test_other_images_go_to_the_pool(max_inline_pixels, inline, kind):
    """Large images, slow formats, and images of a busy engine go to the pool."""
    world = World(max_inline_pixels)
    future = world.start(png(kind=kind), inline=inline, mime_type=f"image/{kind.lower()}")
    assert not isinstance(future, PreprocessedImage)
    assert future.result(TIMEOUT).image.info.width == 40
    world.close()


def test_a_seen_image_is_found_without_a_thread(world):
    """The second time, the bytes are hashed and found in the cache, not decoded."""
    first = world.prepare(png())
    _, found = world.find(png())
    assert isinstance(found, PreprocessedImage)
    assert (first.image.info.cache_hit, found.image.info.cache_hit) == (False, True)
    assert found.image.pixels is first.image.pixels


def test_images_that_look_alike_are_told_apart(world):
    """Images with the same fingerprint but other bytes have other ids."""
    data = png()
    at = data.index(b"IDAT") + 40
    other = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
    world.prepare(data)
    _, found = world.find(other)
    assert isinstance(found, LoadedImage)
    assert found.image_id == image_id(content_key(other)) != image_id(content_key(data))


def test_the_oldest_fingerprint_is_dropped_first(monkeypatch):
    """The number of fingerprints is bounded; the oldest is dropped first."""
    monkeypatch.setattr("legato_engine.images.cache._MAX", 2)
    seen = SeenImages()
    first, second, third = (memoryview(png(seed)) for seed in range(3))
    for each in (first, second, first, third):
        seen.add("", each)
    assert [seen.has("", each) for each in (first, second, third)] == [True, False, True]
