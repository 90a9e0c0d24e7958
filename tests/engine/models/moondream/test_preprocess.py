"""Tilings by table, and the pixels of crops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.kernels.images import CutPlan, resize
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.preprocess import (
    CroppedImage,
    WholeImage,
    crop_geometry,
    crop_image,
    select_tiling,
    whole_image,
)
from legato_engine.models.moondream.presets import legato_tiny_config, moondream2_config
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.types import ImageInfo

VISION = moondream2_config().vision

TABLE = [
    ((378, 378), (1, 1)),
    ((378, 5000), (1, 1)),
    ((5000, 100), (1, 1)),
    ((379, 379), (3, 3)),
    ((512, 512), (3, 3)),
    ((1024, 1024), (3, 3)),
    ((4000, 4000), (3, 3)),
    ((640, 480), (2, 4)),
    ((800, 600), (2, 4)),
    ((850, 600), (2, 4)),
    ((1280, 720), (2, 4)),
    ((1920, 1080), (2, 4)),
    ((3840, 2160), (2, 4)),
    ((4000, 3000), (2, 4)),
    ((480, 640), (4, 2)),
    ((720, 1280), (4, 2)),
    ((1080, 1920), (4, 2)),
    ((1024, 768), (3, 4)),
    ((2048, 1536), (3, 4)),
    ((1500, 2000), (4, 3)),
    ((3000, 1000), (2, 5)),
    ((5000, 400), (1, 10)),
    ((380, 2000), (6, 1)),
]


@pytest.mark.parametrize(("size", "tiling"), TABLE)
def test_tiling_of_moondream2(size, tiling):
    """Known images (width, height) have known rows and columns."""
    width, height = size
    assert select_tiling(height, width, VISION) == tiling


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_tiling_stays_within_its_bounds(height, width):
    """Only an image for which one row is too many gets more than `max_crops` tiles."""
    rows, columns = select_tiling(height, width, VISION)
    assert min(rows, columns) >= 1
    assert rows * columns <= 12 or min(rows, columns) == 1


def test_a_model_of_one_crop_never_tiles(noise_image):
    """`max_crops` 1 gives the whole image alone, whatever its size."""
    vision = legato_tiny_config().vision
    crops = crop_image(noise_image(2000, 1500), vision)
    assert crops.tiling == (1, 1)
    assert crops.pixels_NHWC.shape == (1, 336, 336, 3)


def test_tiles_are_windows_of_the_resized_image(noise_image, tiny_config):
    """Tiles follow the whole image row by row, each a window further."""
    vision = tiny_config.vision
    image = noise_image(150, 150)
    crops = crop_image(image, vision)
    assert crops.tiling == (2, 2)
    assert crops.pixels_NHWC.dtype == np.uint8
    side = 2 * 28 + 2 * 14
    canvas = np.array(image.resize((side, side), 1))
    whole = np.array(image.resize((56, 56), 1))
    assert np.array_equal(crops.pixels_NHWC[0], whole)
    for index, (y, x) in enumerate([(0, 0), (0, 28), (28, 0), (28, 28)]):
        assert np.array_equal(crops.pixels_NHWC[1 + index], canvas[y : y + 56, x : x + 56])


def test_a_small_image_is_encoded_once(noise_image, tiny_config):
    """Tiling (1, 1) has no second copy of the whole image."""
    crops = crop_image(noise_image(30, 20), tiny_config.vision)
    assert crops.tiling == (1, 1)
    assert crops.pixels_NHWC.shape == (1, 56, 56, 3)


INFO = ImageInfo(image_id="img", width=1, height=1, cache_hit=False)


@pytest.mark.parametrize("size", [(850, 600), (480, 640), (300, 300), (900, 379)])
def test_the_device_is_told_to_make_the_same_crops(noise_image, size):
    """The plan's canvas and whole image, cut into tiles, are Pillow's crops."""
    image = noise_image(*size)
    crops = crop_image(image, VISION)
    whole = whole_image(np.asarray(image), VISION)
    assert whole is not None
    assert whole.tiling == crops.tiling
    plan = CutPlan(image.height, image.width, whole.tiling, crop_geometry(VISION))
    assert plan.num_crops == len(crops.pixels_NHWC)
    canvases = [resize(whole.pixels_HWC, t.to_height, t.to_width) for t in plan.targets]
    assert np.array_equal(canvases[0], crops.pixels_NHWC[0])
    for index, crop_HWC in enumerate(crops.pixels_NHWC[1:]):
        y, x = (VISION.window * step for step in divmod(index, whole.tiling[1]))
        assert np.array_equal(canvases[1][y : y + 378, x : x + 378], crop_HWC)


def test_an_image_for_the_device_stays_whole(noise_image):
    """The host cuts nothing, and `num_bytes` is that of the image's own pixels."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer(), resize_on_device=True)
    pixels_HWC = np.asarray(noise_image(850, 600))
    image = frontend.prepare_image(pixels_HWC, "key", INFO)
    assert isinstance(image.pixels, WholeImage)
    assert image.pixels.tiling == (2, 4)
    assert np.shares_memory(image.pixels.pixels_HWC, pixels_HWC)
    assert image.num_bytes == 850 * 600 * 3
    assert isinstance(frontend.prepare_image(noise_image(850, 600), "key", INFO).pixels, WholeImage)


def test_an_image_without_room_on_the_device_is_cut_on_the_host():
    """An image beyond the device's buffers becomes crops."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer(), resize_on_device=True)
    image = frontend.prepare_image(np.zeros((20, 900_000, 3), np.uint8), "key", INFO)
    assert isinstance(image.pixels, CroppedImage)
    assert image.num_bytes == 378 * 378 * 3


def test_an_image_of_too_many_crops_is_cut_on_the_host():
    """Thin images may have more tiles than the device's buffers; others stay whole."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer(), resize_on_device=True)
    thin = frontend.prepare_image(np.zeros((430, 20_000, 3), np.uint8), "key", INFO)
    assert isinstance(thin.pixels, CroppedImage)
    assert len(thin.pixels.pixels_NHWC) > 1 + VISION.max_crops
    assert thin.num_crops == 0
    plain = frontend.prepare_image(np.zeros((600, 850, 3), np.uint8), "key", INFO)
    assert plain.num_crops == plain.pixels.plan.num_crops == 9


def test_pixels_and_pillow_images_are_cut_alike(noise_image):
    """An array and a Pillow image give the same crops."""
    frontend = MoondreamFrontend(moondream2_config(), StandInTokenizer())
    images = [
        frontend.prepare_image(given, "key", INFO)
        for given in (noise_image(500, 400), np.asarray(noise_image(500, 400)))
    ]
    assert np.array_equal(images[0].pixels.pixels_NHWC, images[1].pixels.pixels_NHWC)
    assert images[0].num_bytes == images[1].num_bytes == images[0].pixels.pixels_NHWC.nbytes
