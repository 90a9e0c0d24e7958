"""A coarse outline and its refinement."""

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.presets import tiny_random3_config
from legato_engine.models.moondream.refiner import MoondreamRefiner
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.models.moondream.vision import normalised, patches
from legato_engine.models.moondream.weights import random_weights
from legato_engine.types import Box, ImageInfo, Outline
from PIL import Image

from tests.engine.models.moondream.outlines.heads import BRIGHT, DARK, write_learnt_head
from tests.engine.models.moondream.outlines.shapes import drawn, overlap

CONFIG = tiny_random3_config()
CPU = torch.device("cpu")
WIDTH, HEIGHT = 320, 240
INFO = ImageInfo(image_id="i", width=WIDTH, height=HEIGHT, cache_hit=False)
SQUARE = "M 0,0 L 1,0 L 1,1 L 0,1 Z"


@pytest.fixture(scope="module")
def network():
    """Moondream 3, tiny, with random weights."""
    return random_weights(CONFIG, 0, CPU, torch.float32)


@pytest.fixture(scope="module")
def learnt(network, tmp_path_factory):
    """A refiner trained to find what is bright in its box."""
    path = tmp_path_factory.mktemp("head") / "model.pt"
    write_learnt_head(path, "tiny", CONFIG, network.vision)
    return MoondreamRefiner(CONFIG, network.vision, path)


def prepared(pixels_HWC):
    """The image as a frontend prepares it for a refiner."""
    frontend = MoondreamFrontend(CONFIG, StandInTokenizer()).keeping_images()
    return frontend.prepare_image(Image.fromarray(pixels_HWC), "k", INFO)


def refined(refiner, outline, image):
    """The refiner's calls in the engine's order."""
    given = refiner.prepare(outline, image)
    for device, host in zip(refiner.given, refiner.tensors(given), strict=True):
        device.copy_(host)
    refiner.refine()
    return refiner.finish(outline, given, refiner.answer.numpy())


def scene(x, y, half_width, half_height):
    """A bright ellipse on dark, and its mask."""
    ys, xs = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    truth = ((xs - x) / half_width) ** 2 + ((ys - y) / half_height) ** 2 < 1
    noise = np.random.default_rng(1).normal(0, 8, (HEIGHT, WIDTH, 3))
    pixels = np.where(truth[..., None], BRIGHT, DARK) + noise
    return pixels.clip(0, 255).astype(np.uint8), truth


@pytest.mark.parametrize(
    ("x", "y", "half_width", "half_height"), [(160, 120, 60, 40), (100, 90, 35, 60)]
)
def test_a_box_around_an_ellipse_becomes_the_ellipse(learnt, x, y, half_width, half_height):
    """The coarse outline overlaps it by less than 0.8, the refined one by more than 0.85."""
    pixels, truth = scene(x, y, half_width, half_height)
    box = Box(
        x_min=(x - half_width) / WIDTH,
        y_min=(y - half_height) / HEIGHT,
        x_max=(x + half_width) / WIDTH,
        y_max=(y + half_height) / HEIGHT,
    )
    coarse = Outline(path=SQUARE, box=box, label="egg")
    better = refined(learnt, coarse, prepared(pixels))
    overlaps = [
        overlap(truth, drawn(each.path, msgspec.structs.astuple(each.box), WIDTH, HEIGHT))
        for each in (coarse, better)
    ]
    assert overlaps[0] < 0.8
    assert overlaps[1] > 0.85
    assert (better.label, better.coarse) == ("egg", False)
    assert refined(learnt, coarse, prepared(pixels)) == better, "the same again"


def test_the_tap_is_what_a_shorter_encoder_gives(network):
    """A tapped encoder has a shorter encoder's features, and its own bits at the end."""
    vision = network.vision
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 56, 56, 3), np.uint8))
    fed = patches(normalised(pixels, torch.float32), 14)
    early, late = vision.encode_tapped(fed, 0)
    assert torch.equal(late, vision.encode_patches(fed))
    x, y = vision.blocks[0](vision.patch_emb(fed), vision.pos_emb)
    assert torch.equal(early, x + y)


def test_images_are_kept_for_a_refiner_only():
    """Kept originals count towards the cache's bytes."""
    pixels, _ = scene(10, 10, 5, 5)
    image = prepared(pixels)
    plain = MoondreamFrontend(CONFIG, StandInTokenizer()).prepare_image(
        Image.fromarray(pixels), "k", INFO
    )
    assert np.array_equal(image.pixels.original, pixels)
    assert plain.pixels.original is None
    assert image.num_bytes == plain.num_bytes + pixels.nbytes


def test_an_image_left_whole_is_there_already():
    """An uncropped image is its own original, whichever option is set first."""
    frontend = MoondreamFrontend(CONFIG, StandInTokenizer())
    pixels, _ = scene(10, 10, 5, 5)
    for made in (
        frontend.resizing_on_device().keeping_images(),
        frontend.keeping_images().resizing_on_device(),
    ):
        image = made.prepare_image(Image.fromarray(pixels), "k", INFO)
        assert np.array_equal(image.pixels.original, pixels)


def test_a_model_without_settings_for_it_takes_no_refiner(network, tmp_path):
    """Moondream 2 has no outlines."""
    config = msgspec.structs.replace(CONFIG, refiner=None)
    with pytest.raises(InvalidField, match="takes no refiner") as caught:
        MoondreamRefiner(config, network.vision, tmp_path / "head.pt")
    assert caught.value.metadata["field"] == "refiner"
