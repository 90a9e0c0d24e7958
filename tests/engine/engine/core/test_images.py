"""Images of requests: cached, new, kept and freed."""

import dataclasses
import gc
import io
import math
import weakref

import numpy as np
import pytest
from legato_engine.core.requests import PendingRequest
from legato_engine.ipc.messages import Started
from legato_engine.types import (
    CachedImage,
    CaptionTask,
    DetectTask,
    PixelFormat,
    QueryTask,
    RawImage,
    RequestKey,
)
from PIL import Image

from tests.engine.engine.core.world import EITHER_KIND, GatedFrontend, World, png


@EITHER_KIND
def test_image_is_cached_by_content_and_by_id(world):
    """The same bytes and their id are hits with the same result."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    world.submit("b", DetectTask(object="x"), world.encoded(png()))
    world.submit("c", DetectTask(object="x"), CachedImage(image_id=first.image.image_id))
    for done in world.run("b", "c"):
        assert done.image.cache_hit
        assert done.image.image_id == first.image.image_id
        assert done.usage.cached_tokens > 0
        assert done.result == first.result
    assert world.core.load().images_cached == 1


@pytest.mark.parametrize("by", ["bytes", "id"])
def test_a_known_image_needs_no_thread(world, by):
    """In an idle engine, a request on a cached image is scheduled by `submit`."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    while world.core.busy:
        world.core.step()
    named = CachedImage(image_id=first.image.image_id)
    world.submit("b", DetectTask(object="x"), named if by == "id" else world.encoded(png()))
    assert world.core.busy
    assert world.core.next_deadline() == math.inf
    world.core.step()
    assert world.of("b", Started)


def test_bytes_are_not_hashed_between_steps(world):
    """While other requests run, a thread hashes the bytes, even those of a cached image."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()))
    (first,) = world.run("a")
    while world.core.busy:
        world.core.step()
    world.submit("other", QueryTask(question="hello"))
    world.submit("b", DetectTask(object="x"), world.encoded(png()))
    assert world.core.load().waiting == 2
    assert world.core._requests.count(PendingRequest) == 1
    assert isinstance(world.core._requests.get(RequestKey("b")), PendingRequest)
    done = world.run("other", "b")[1]
    assert done.image.cache_hit
    assert done.result == first.result


def test_uncached_image_leaves_nothing(world):
    """Without `cache_image` neither the image nor its prefix is kept."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()), cache_image=False)
    (done,) = world.run("a")
    assert world.core.load().images_cached == 0
    assert world.core.load().prefix_pages == 0
    world.submit("b", DetectTask(object="x"), CachedImage(image_id=done.image.image_id))
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
    world.submit("raw", CaptionTask(), raw)
    world.submit("png", CaptionTask(), world.encoded(data))
    raw_done, png_done = world.run("raw", "png")
    assert raw_done.result == png_done.result


def test_oriented_image(world):
    """`ImageInfo` has the displayed size."""
    exif = Image.Exif()
    exif[0x0112] = 6
    world.submit("r", CaptionTask(), world.encoded(png(exif=exif.tobytes())))
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
        world.submit("r", QueryTask(question=question), world.encoded(png()), cache_image=False)
        world.run("r")
        world.close()  # the threads that prepared it have ended, too
        assert [image() for image in frontend.images] in ([None], [])  # cancelled before it began
    finally:
        gc.enable()
