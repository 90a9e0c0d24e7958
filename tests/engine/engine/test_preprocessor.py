"""Pictures prepared on threads, and what the caller's thread does beside them."""

import io
import threading
from typing import Any, cast

import numpy as np
import pytest
from legato_engine.core import EncodedImage
from legato_engine.engine import preprocessor
from legato_engine.engine.lazy import Lazy
from legato_engine.engine.preprocessor import LoadedImage, PreprocessedImage, Preprocessor
from legato_engine.images.cache import ImageCache
from legato_engine.images.decoding import content_key, decode_file, image_id, inspect
from legato_engine.images.pixel_memory import PixelMemory, host_slab
from legato_engine.images.seen_images import SeenImages
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm.blob_reader import BlobReader
from legato_engine.shm.blob_store import BlobStore, new_namespace
from PIL import Image

TIMEOUT = 30.0


class Frontend:
    """Keeps the pixels as they are."""

    def prepare_image(self, pixels_HWC, key, info):
        """As a model's frontend."""
        return PreparedImage(key=key, pixels=pixels_HWC, info=info, num_bytes=pixels_HWC.nbytes)


class World:
    """A preprocessor with one thread, and a service that hands it pictures."""

    def __init__(self, max_inline_pixels=0):
        self.blobs = BlobStore(new_namespace())
        self.preprocessor = Preprocessor(
            cast(ModelFrontend, Frontend()),
            ImageCache[PreparedImage](1 << 20),
            blobs=BlobReader(self.blobs.namespace),
            max_pixels=10_000,
            threads=1,
            memory=PixelMemory(host_slab(1 << 20)),
            max_inline_pixels=max_inline_pixels,
        )

    def find(self, data, mime_type="image/png"):
        """The picture's source, and what the preprocessor says of it with nothing else to do."""
        source = EncodedImage(blob=self.blobs.put(data), mime_type=mime_type)
        return source, self.preprocessor.find(source, may_hash=True)

    def start(self, data, *, inline, mime_type="image/png", prefetch=None):
        """A picture that is new, prepared or on its way."""
        source, found = self.find(data, mime_type)
        assert isinstance(found, LoadedImage)
        return self.preprocessor.start(source, found, keep=True, inline=inline, prefetch=prefetch)

    def prepare(self, data: bytes) -> PreprocessedImage:
        """A picture that is new, prepared on a thread."""
        future = self.start(data, inline=False)
        assert not isinstance(future, PreprocessedImage)
        return cast("PreprocessedImage", future.result(TIMEOUT))

    def close(self):
        """Stop the thread."""
        self.preprocessor.close()
        self.blobs.close()


@pytest.fixture
def world():
    """A world that ends with the test."""
    made = World()
    yield made
    made.close()


def png(seed=0, kind="PNG"):
    """A picture of noise, 40 by 30."""
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def hashed_last(monkeypatch):
    """Whoever hashes waits until the picture is decoded."""
    decoded = threading.Event()

    def decode(*arguments: Any, **options: Any) -> Any:
        pixels_HWC = decode_file(*arguments, **options)
        decoded.set()
        return pixels_HWC

    def hash_behind(*arguments: Any) -> str:
        assert decoded.wait(TIMEOUT)
        return content_key(*arguments)

    monkeypatch.setattr(preprocessor, "decode_file", decode)
    monkeypatch.setattr(preprocessor, "content_key", hash_behind)


def test_a_new_picture_is_decoded_while_its_bytes_are_hashed(world, hashed_last):
    """The decoding of a new picture does not wait for its hash."""
    data = png()
    assert world.prepare(data).image.info.image_id == image_id(content_key(data))


def test_a_quick_picture_is_prepared_by_who_asks(hashed_last):
    """With nothing else to do it needs a thread for its hash only, which nothing waits for."""
    world, data = World(max_inline_pixels=40 * 30), png(kind="JPEG")
    needed = Lazy(threading.get_ident)
    picture = world.start(data, inline=True, mime_type="image/jpeg", prefetch=needed)
    world.close()
    assert isinstance(picture, PreprocessedImage)
    assert needed.is_computed
    assert needed.get() != threading.get_ident()
    assert picture.image.info.image_id == image_id(content_key(data))


def test_a_header_is_read_once(monkeypatch):
    """Whether an image is small enough and how it is decoded follow from one read."""
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
def test_others_take_a_thread(max_inline_pixels, inline, kind):
    """Large ones do, those of slow formats, and all while somebody else waits."""
    world = World(max_inline_pixels)
    future = world.start(png(kind=kind), inline=inline, mime_type=f"image/{kind.lower()}")
    assert not isinstance(future, PreprocessedImage)
    assert future.result(TIMEOUT).image.info.width == 40
    world.close()


def test_a_picture_that_was_seen_is_found_without_a_thread(world):
    """The second time its bytes are hashed, known, and not decoded."""
    first = world.prepare(png())
    _, found = world.find(png())
    assert isinstance(found, PreprocessedImage)
    assert (first.image.info.cache_hit, found.image.info.cache_hit) == (False, True)
    assert found.image.pixels is first.image.pixels


def test_pictures_that_look_alike_are_told_apart(world):
    """One that differs only where nobody glanced is another picture."""
    data = png()
    at = data.index(b"IDAT") + 40
    other = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
    world.prepare(data)
    _, found = world.find(other)
    assert isinstance(found, LoadedImage)
    assert found.image_id == image_id(content_key(other)) != image_id(content_key(data))


def test_the_oldest_glimpse_goes_first(monkeypatch):
    """What was seen last is remembered, within bounds."""
    monkeypatch.setattr("legato_engine.images.seen_images._MAX", 2)
    seen = SeenImages()
    first, second, third = (memoryview(png(seed)) for seed in range(3))
    for each in (first, second, first, third):
        seen.add(each)
    assert [each in seen for each in (first, second, third)] == [True, False, True]
