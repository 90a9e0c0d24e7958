"""Damaged image files on their whole way: the service's intake, shared memory, the engine."""

import random
from concurrent.futures import Future
from typing import cast

import pytest
from legato.v1 import media_pb2
from legato_engine.core.preprocessor import Preprocessor
from legato_engine.errors import ImageTooLarge, ImageUndecodable, LegatoError
from legato_engine.images.cache import ImageCache, ImageKey
from legato_engine.images.memory import PixelMemory, host_slab
from legato_engine.models.bundle import ModelFrontend, PreparedImage
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import EncodedImage
from legato_service.images.intake import ImageIntake, stage

from tests.fuzz.mutation import mutate
from tests.fuzz.seeds import images

MUTANTS = 2000
SEED = 16
MAX_PIXELS = 1_000_000


class Frontend:
    """A frontend that keeps the pixels as they are."""

    def prepare_image(self, pixels_HWC, key, info):
        """Wrap the pixels; reading them shows that they are there."""
        assert pixels_HWC.shape == (info.height, info.width, 3)
        assert 0 <= pixels_HWC.mean() <= 255
        return PreparedImage(key=key, pixels=pixels_HWC, info=info, num_bytes=0)


@pytest.fixture
def intake():
    """The service's side and the engine's side of images."""
    blobs = BlobStore(new_namespace())
    preprocessor = Preprocessor(
        cast(ModelFrontend, Frontend()),
        ImageCache[ImageKey, PreparedImage](0),
        blobs=BlobReader(blobs.namespace),
        max_pixels=MAX_PIXELS,
        threads=2,
        memory=PixelMemory(host_slab(1 << 24)),
        max_inline_pixels=MAX_PIXELS,
    )
    yield ImageIntake(max_bytes=1 << 20, max_pixels=MAX_PIXELS), preprocessor, blobs
    preprocessor.close()
    blobs.close()


async def prepare(path, data, *, inline):
    """The type of error of an image, or None if it is prepared."""
    intake, preprocessor, blobs = path
    try:
        image = await intake.check(media_pb2.Image(encoded=media_pb2.EncodedImage(data=data)))
    except LegatoError as error:
        return type(error)
    source = stage(image, blobs)
    assert isinstance(source, EncodedImage)
    try:
        found = preprocessor.find(source, tenant="", may_hash=inline)
        pending = preprocessor.start(source, found, tenant="", keep=False, inline=inline)
        if isinstance(pending, Future):
            pending.result(60)
    except LegatoError as error:
        return type(error)
    finally:
        blobs.discard(source.blob)
    return None


@pytest.mark.timeout(600)
async def test_damaged_files_are_decoded_or_refused(intake):
    """Of 2,000 mutants none crashes a decoder or is called a fault of the server."""
    chance = random.Random(SEED)
    ends: dict[type[LegatoError] | None, int] = {}
    for number in range(MUTANTS):
        data = mutate(images()[number % len(images())], chance)
        end = await prepare(intake, data, inline=bool(number % 2))
        ends[end] = ends.get(end, 0) + 1
    assert set(ends) <= {None, ImageUndecodable, ImageTooLarge}
    assert min(ends[None], ends[ImageUndecodable]) > MUTANTS // 20  # both are exercised
    lane = intake[1]._light
    assert len(lane.workers.pids) == len(lane.workers._idle)


async def test_undamaged_files_are_decoded(intake):
    """The control: every seed is prepared."""
    for data in images():
        for inline in (False, True):
            assert await prepare(intake, data, inline=inline) is None
