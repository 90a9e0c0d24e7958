"""Images of requests: prepared, cached, leased and freed."""

import dataclasses
import gc
import io
import math
import threading
import time
import weakref
from typing import Any, cast

import numpy as np
import pytest
from legato_engine.core import preprocessor
from legato_engine.core.preprocessor import Lazy, LoadedImage, PreprocessedImage, Preprocessor
from legato_engine.core.requests import PendingRequest
from legato_engine.images.cache import ImageCache, ImageKey, SeenImages
from legato_engine.images.decoding import content_key, decode_baseline, image_id
from legato_engine.images.headers import inspect
from legato_engine.images.memory import PixelMemory, host_slab
from legato_engine.ipc.messages import Done, DropImage, HoldImage, ImageDropped, PrefillStarted
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import (
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    EncodedImage,
    PixelFormat,
    QuerySpec,
    RawImage,
    RequestKey,
)
from PIL import Image

from tests.engine.core.world import EITHER_KIND, GatedFrontend, World, png


@EITHER_KIND
def test_image_is_cached_by_content_and_by_id(world):
    """The same bytes and their id are hits with the same result."""
    world.submit("a", DetectSpec(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    world.submit("b", DetectSpec(object="x"), world.encoded(png()))
    world.submit("c", DetectSpec(object="x"), CachedImageRef(image_id=first.image.image_id))
    for done in world.run("b", "c"):
        assert done.image.cache_hit
        assert done.image.image_id == first.image.image_id
        assert done.usage.cached_tokens > 0
        assert done.result == first.result
    assert world.core.load().images_cached == 1


@pytest.mark.parametrize("by", ["bytes", "id"])
def test_a_known_image_needs_no_thread(world, by):
    """In an idle engine, a request on a cached image is scheduled by `submit`."""
    world.submit("a", DetectSpec(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    while world.core.busy:
        world.core.step()
    named = CachedImageRef(image_id=first.image.image_id)
    world.submit("b", DetectSpec(object="x"), named if by == "id" else world.encoded(png()))
    assert world.core.busy
    assert world.core.next_deadline() == math.inf
    world.core.step()
    assert world.of("b", PrefillStarted)


def test_bytes_are_not_hashed_between_steps(world):
    """While other requests run, a thread hashes the bytes, even those of a cached image."""
    world.submit("a", DetectSpec(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    while world.core.busy:
        world.core.step()
    world.submit("other", QuerySpec(question="hello"))
    world.submit("b", DetectSpec(object="x"), world.encoded(png()))
    assert world.core.load().waiting == 2
    assert world.core.requests.count(PendingRequest) == 1
    assert isinstance(world.core.requests.get(RequestKey("b")), PendingRequest)
    done = world.run("other", "b")[1]
    assert done.image.cache_hit
    assert done.result == first.result


def test_uncached_image_leaves_nothing(world):
    """Without `cache_image` neither the image nor its prefix is kept."""
    world.submit("a", DetectSpec(object="x"), world.encoded(png()), cache_image=False)
    (done,) = world.run("a")
    assert world.core.load().images_cached == 0
    assert world.core.load().prefix_pages == 0
    world.submit("b", DetectSpec(object="x"), CachedImageRef(image_id=done.image.image_id))
    world.run("b")
    assert type(world.error("b")).__name__ == "ImageNotFound"


def test_raw_image_answers_like_its_file(world):
    """Raw pixels and their PNG give the same result."""
    data = png()
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    raw = RawImage(
        blob=world.blobs.put(pixels.tobytes()),
        width=40,
        height=30,
        row_stride=120,
        format=PixelFormat.RGB8,
    )
    world.submit("raw", CaptionSpec(), raw)
    world.submit("png", CaptionSpec(), world.encoded(data))
    raw_done, png_done = world.run("raw", "png")
    assert raw_done.result == png_done.result


def test_oriented_image(world):
    """`ImageInfo` has the displayed size."""
    exif = Image.Exif()
    exif[0x0112] = 6
    world.submit("r", CaptionSpec(), world.encoded(png(exif=exif.tobytes())))
    (done,) = world.run("r")
    assert (done.image.width, done.image.height) == (30, 40)


class WatchedFrontend(GatedFrontend):
    """A frontend that knows which of its images are still in memory."""

    def __init__(self, frontend):
        super().__init__(frontend)
        self.images = []
        self.gate.set()

    def prepare_image(self, *arguments):
        """Keep a weak reference to the image."""
        image = super().prepare_image(*arguments)
        self.images.append(weakref.ref(image.pixels.pixels_NHWC))
        return image


@pytest.mark.parametrize("question", ["hello", "too long " * 2000], ids=["answered", "refused"])
def test_an_image_is_freed_with_its_request(assembly, question):
    """Only a cache keeps an image after its request has ended, not even a garbage cycle."""
    frontend = WatchedFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend))
    gc.disable()
    try:
        world.submit("r", QuerySpec(question=question), world.encoded(png()), cache_image=False)
        world.run("r")
        world.close()  # the threads that prepared it have ended, too
        world.core.step()  # forgets an image that was finished after its request
        assert [image() for image in frontend.images] in ([None], [])  # cancelled before it began
    finally:
        gc.enable()


# ---------------------------------------------------------------- leases
# Leases of images in the engine.


def test_a_leased_image_gives_the_result_of_its_bytes(world):
    """A leased image named by its id gives the result of its bytes; once dropped, it is unknown."""
    world.submit("a", DetectSpec(object="x"), world.encoded(png()), cache_image=False)
    (by_bytes,) = world.run("a")
    named = CachedImageRef(image_id=world.hold(png()).image.image_id)
    world.submit("b", DetectSpec(object="x"), named)
    (by_id,) = world.run("b")
    assert by_id.result == by_bytes.result
    assert by_id.image.cache_hit
    world.core.drop(DropImage(request_id=RequestKey("d"), image_id=named.image_id, owner="me"))
    assert world.of("d", ImageDropped)
    world.submit("c", DetectSpec(object="x"), named)
    world.run("c")
    assert type(world.error("c")).__name__ == "ImageNotFound"


def test_a_running_request_keeps_its_image(world):
    """A request keeps its image when that is dropped before the request runs."""
    named = CachedImageRef(image_id=world.hold(png()).image.image_id)
    world.submit("a", DetectSpec(object="x"), named)
    world.core.drop(DropImage(request_id=RequestKey("d"), image_id=named.image_id, owner="me"))
    assert isinstance(world.run("a")[0], Done)


def test_the_loop_wakes_for_the_end_of_a_lease(world):
    """An idle engine frees an image at the end of its lease."""
    held = world.hold(png(), ttl=0.05)
    assert world.core.next_deadline() == held.until
    assert world.core.load().images_cached == 1
    while time.monotonic() < held.until:
        time.sleep(0.01)
    world.core.step()
    assert world.core.load().images_cached == 0
    assert world.core.next_deadline() == math.inf


def test_a_lease_ends_on_time_however_late_the_loop_is(world):
    """A request after the expiry gets `ImageNotFound` even if the loop has not run since."""
    held = world.hold(png(), ttl=0.05)
    while time.monotonic() < held.until:
        time.sleep(0.01)
    world.submit("late", DetectSpec(object="x"), CachedImageRef(image_id=held.image.image_id))
    assert type(world.error("late")).__name__ == "ImageNotFound"


def test_leases_wait_in_the_same_queue(assembly):
    """Pending leases count against the queue limit like requests."""
    world = World(assembly, max_waiting=1, preprocess_threads=1)
    gated = GatedFrontend(assembly.frontend)
    world.core.preprocessor._frontend = gated
    for number in range(3):
        image = world.encoded(png(number))
        world.core.hold(
            HoldImage(request_id=RequestKey(str(number)), image=image, owner="me", ttl=9.0)
        )
    assert [type(world.error(name)).__name__ for name in "12"] == ["QueueFull"] * 2
    assert not world.of("0")
    for number in range(3):
        world.core.abort(RequestKey(str(number)))
    gated.gate.set()
    world.close()


def test_leases_and_requests_of_a_tenant_share_its_part_of_the_queue(assembly):
    """A lease is its caller's tenant's, whoever owns the image by the quota of bytes."""
    world = World(assembly, max_waiting_per_tenant=1, preprocess_threads=1)
    gated = GatedFrontend(assembly.frontend)
    world.core.preprocessor._frontend = gated
    for name, tenant in (("a", "x"), ("b", "y")):
        key = RequestKey(name, tenant)
        world.core.hold(
            HoldImage(request_id=key, image=world.encoded(png()), owner=f"tenant:{tenant}", ttl=9.0)
        )
    world.submit("c", DetectSpec(object="x"), world.encoded(png(1)), tenant="x")
    assert type(world.error("c")).__name__ == "QuotaExceeded"
    assert not world.of("a") + world.of("b")
    for name, tenant in (("a", "x"), ("b", "y")):
        world.core.abort(RequestKey(name, tenant))
    gated.gate.set()
    world.close()


# ---------------------------------------------------------------- preprocessor
# Preparation of images, on threads and inline.

TIMEOUT = 30.0


class Frontend:
    """A frontend that keeps the pixels as they are."""

    def prepare_image(self, pixels_HWC, key, info):
        """Wrap the pixels."""
        return PreparedImage(key=key, pixels=pixels_HWC, info=info, num_bytes=pixels_HWC.nbytes)


class Preparation:
    """A preprocessor with one thread, and blobs for it."""

    def __init__(self, max_inline_pixels=0, **options):
        self.blobs = BlobStore(new_namespace())
        self.preprocessor = Preprocessor(
            cast(ModelFrontend, Frontend()),
            ImageCache[ImageKey, PreparedImage](1 << 20),
            blobs=BlobReader(self.blobs.namespace),
            max_pixels=10_000,
            threads=1,
            memory=PixelMemory(host_slab(1 << 20)),
            max_inline_pixels=max_inline_pixels,
            **options,
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
def preparation():
    """A world that ends with the test."""
    made = Preparation()
    yield made
    made.close()


def noise_png(seed=0, kind="PNG"):
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


def test_a_new_image_is_decoded_while_its_bytes_are_hashed(preparation, hashed_last):
    """Decoding a new image does not wait for its hash."""
    data = noise_png(kind="JPEG")
    assert preparation.prepare(data, "image/jpeg").image.info.image_id == image_id(
        content_key(data)
    )


def test_a_small_image_is_prepared_inline(hashed_last):
    """The helper thread hashes it and computes `prefetch` meanwhile."""
    world, data = Preparation(max_inline_pixels=40 * 30), noise_png(kind="JPEG")
    needed = Lazy(threading.get_ident)
    prepared = world.start(data, inline=True, mime_type="image/jpeg", prefetch=needed)
    world.close()
    assert isinstance(prepared, PreprocessedImage)
    assert needed.is_computed
    assert needed.get() != threading.get_ident()
    assert prepared.image.info.image_id == image_id(content_key(data))


@pytest.mark.parametrize("max_inline_pixels", [0, 40 * 30])
def test_another_decoder_has_plain_jpegs_and_libjpeg_those_it_refuses(max_inline_pixels):
    """A PNG is not shown to it."""
    shown: list[bytes] = []

    def grey(data, pixels_HWC):
        shown.append(bytes(data))
        pixels_HWC[:] = 77
        return len(shown) == 1

    world = Preparation(max_inline_pixels, decode_jpeg=grey)
    files = [noise_png(seed, "JPEG") for seed in range(2)]
    images = [world.prepare(data, "image/jpeg").image for data in files]
    world.prepare(noise_png())
    world.close()
    assert shown == files
    assert (images[0].pixels == 77).all()
    assert np.array_equal(images[1].pixels, np.asarray(Image.open(io.BytesIO(files[1]))))


def test_a_header_is_read_once(monkeypatch):
    """One read decides both whether an image is small and how it is decoded."""
    reads = []

    def count(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments)
        return inspect(*arguments, **options)

    monkeypatch.setattr(preprocessor, "inspect", count)
    for max_inline_pixels in (0, 40 * 30):
        world = Preparation(max_inline_pixels)
        world.start(noise_png(kind="JPEG"), inline=True, mime_type="image/jpeg")
        world.close()
        assert len(reads) == 1
        reads.clear()


@pytest.mark.parametrize(
    ("max_inline_pixels", "inline", "kind"),
    [(1199, True, "JPEG"), (1200, False, "JPEG"), (1200, True, "PNG")],
)
def test_other_images_go_to_the_pool(max_inline_pixels, inline, kind):
    """Large images, slow formats, and images of a busy engine go to the pool."""
    world = Preparation(max_inline_pixels)
    future = world.start(noise_png(kind=kind), inline=inline, mime_type=f"image/{kind.lower()}")
    assert not isinstance(future, PreprocessedImage)
    assert future.result(TIMEOUT).image.info.width == 40
    world.close()


def test_a_seen_image_is_found_without_a_thread(preparation):
    """The second time, the bytes are hashed and found in the cache, not decoded."""
    first = preparation.prepare(noise_png())
    _, found = preparation.find(noise_png())
    assert isinstance(found, PreprocessedImage)
    assert (first.image.info.cache_hit, found.image.info.cache_hit) == (False, True)
    assert found.image.pixels is first.image.pixels


def test_images_that_look_alike_are_told_apart(preparation):
    """Images with the same fingerprint but other bytes have other ids."""
    data = noise_png()
    at = data.index(b"IDAT") + 40
    other = data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
    preparation.prepare(data)
    _, found = preparation.find(other)
    assert isinstance(found, LoadedImage)
    assert found.image_id == image_id(content_key(other)) != image_id(content_key(data))


def test_the_oldest_fingerprint_is_dropped_first(monkeypatch):
    """The number of fingerprints is bounded; the oldest is dropped first."""
    monkeypatch.setattr("legato_engine.images.cache._MAX", 2)
    seen = SeenImages()
    first, second, third = (memoryview(noise_png(seed)) for seed in range(3))
    for each in (first, second, first, third):
        seen.add("", each)
    assert [seen.has("", each) for each in (first, second, third)] == [True, False, True]
