"""The reference's images: cutting, encoding and stitching."""

import math

import numpy as np
import pytest
import torch

from tests.reference.cases import CONFIG, noise, torch_gelu, weights
from tests.reference.moondream3 import encode_image, full, thin, vision
from tests.reference.moondream3.numerics import layer_norm, linear, random_weights

WEIGHTS = weights()
FULL = full().vision
SMALL = CONFIG.vision

# (width, height), tiling, size resized to (height, width), stitched grid
TABLE = [
    ([(378, 378), (1000, 378), (200, 3000), (1, 1)], (1, 1), (378, 378), (27, 27)),
    ([(379, 379), (512, 512), (1024, 1024), (4000, 4000)], (3, 3), (910, 910), (65, 65)),
    ([(640, 480), (800, 600), (850, 600)], (2, 4), (644, 1176), (46, 84)),
    ([(1280, 720), (1920, 1080), (3840, 2160), (4000, 3000)], (2, 4), (644, 1176), (46, 84)),
    ([(480, 640), (720, 1280), (1080, 1920)], (4, 2), (1176, 644), (84, 46)),
    ([(1024, 768), (2048, 1536)], (3, 4), (910, 1176), (65, 84)),
    ([(1500, 2000)], (4, 3), (1176, 910), (84, 65)),
    ([(3000, 1000)], (2, 5), (644, 1442), (46, 103)),
    ([(5000, 400)], (1, 10), (378, 2772), (27, 198)),
    ([(380, 2000)], (6, 1), (1708, 378), (122, 27)),
]
ROWS = [(size, *row[1:]) for row in TABLE for size in row[0]]


@pytest.mark.parametrize(("size", "tiles", "resized", "grid"), ROWS)
def test_the_table_of_tilings(size, tiles, resized, grid):
    """Every row of the description's table: tiles, resized image and stitched grid."""
    width, height = size
    assert vision.choose_tiling(height, width, FULL) == tiles
    assert tuple(count * FULL.window + FULL.overlap for count in tiles) == resized
    features = np.zeros((tiles[0] * tiles[1], FULL.grid, FULL.grid, 1))
    assert vision.stitch(features, tiles, FULL).shape == (*grid, 1)


def test_pictures_have_1_to_12_tiles():
    """Up to 7560 pixels a side there are 1..12 tiles beside the whole image."""
    sizes = [1, 378, 379, 400, 500, 644, 645, 900, 1176, 1177, 1500, 2000, 3333, 5000, 7560]
    for height in sizes:
        for width in sizes:
            rows, columns = vision.choose_tiling(height, width, FULL)
            assert rows >= 1
            assert columns >= 1
            assert rows * columns <= FULL.max_crops


def test_tiles_that_would_be_too_many_are_taken_from_the_longer_side():
    """Where 2 x 7 tiles suit the sides, 2 x 6 are left."""
    assert vision.choose_tiling(379, 1287, FULL) == (2, 6)
    assert vision.choose_tiling(1287, 379, FULL) == (6, 2)


def test_a_long_strip_has_more_tiles():
    """The rule rounds a row up to one, which gives a strip more than 12 tiles."""
    assert vision.choose_tiling(600, 7561, FULL) == (1, 13)
    assert vision.choose_tiling(20000, 600, FULL) == (21, 1)


@pytest.mark.parametrize("size", [(40, 60), (90, 40), (200, 30), (90, 90)])
def test_stitched_crops_are_the_resized_picture(size):
    """Features of a patch alone are stitched to those of the uncut image."""
    rgb = noise(*size)
    cut, tiles = vision.crops(rgb, SMALL)
    assert tiles != (1, 1)
    pixels = cut[1:].astype(np.float64)
    height, width = (count * SMALL.window + SMALL.overlap for count in tiles)
    resized = vision.resize(rgb, height, width).astype(np.float64)
    whole = vision.patchify(resized, SMALL.patch)
    patches = np.stack([vision.patchify(tile, SMALL.patch) for tile in pixels])
    features = patches.reshape(len(patches), SMALL.grid, SMALL.grid, -1)
    stitched = vision.stitch(features, tiles, SMALL)
    np.testing.assert_array_equal(stitched.reshape(len(whole), -1), whole)


def test_outer_tiles_keep_their_outer_margin():
    """Each cell comes from the tile that has it inside, or in its outer margin."""
    tiles = np.broadcast_to(np.arange(6.0)[:, None, None, None], (6, SMALL.grid, SMALL.grid, 1))
    owners = vision.stitch(tiles, (2, 3), SMALL)[..., 0]
    rows = np.repeat([0, 1], [6, 6])  # 7 patches: a margin of 1, 5 inside, a margin of 1
    columns = np.repeat([0, 1, 2], [6, 5, 6])
    np.testing.assert_array_equal(owners, rows[:, None] * 3 + columns)


def test_the_whole_picture_is_the_first_crop():
    """Crop 0 is the image resized to a crop, and with one tile that tile equals it."""
    rgb = noise(30, 20)
    cut, tiles = vision.crops(rgb, SMALL)
    assert tiles == (1, 1)
    assert cut.shape == (2, SMALL.crop, SMALL.crop, 3)
    np.testing.assert_array_equal(cut[0], vision.resize(rgb, SMALL.crop, SMALL.crop))
    np.testing.assert_array_equal(cut[0], cut[1])


@pytest.mark.parametrize(
    "rgb", [np.zeros((9, 9), np.uint8), np.zeros((9, 9, 4), np.uint8), np.zeros((9, 9, 3))]
)
def test_other_pixels_are_refused(rgb):
    """Grey, alpha and floats are refused."""
    with pytest.raises(ValueError, match="rgb"):
        encode_image(rgb, CONFIG, WEIGHTS)


@pytest.mark.parametrize("grid", [row[3] for row in TABLE] + [(3, 5)])
def test_pooling_is_a_double_loop_and_torchs(grid):
    """Cell (k, l) is the mean of rows floor(kn/27)..ceil((k+1)n/27) and columns likewise."""
    features = np.random.default_rng(8).standard_normal((*grid, 3))
    expected = np.empty((27, 27, 3))
    for k in range(27):
        top, bottom = math.floor(k * grid[0] / 27), math.ceil((k + 1) * grid[0] / 27)
        for m in range(27):
            left, right = math.floor(m * grid[1] / 27), math.ceil((m + 1) * grid[1] / 27)
            expected[k, m] = features[top:bottom, left:right].mean(axis=(0, 1))
    ours = vision.adaptive_pool(features, 27)
    np.testing.assert_allclose(ours, expected, atol=1e-13)
    channels_first = torch.from_numpy(features).permute(2, 0, 1)
    theirs = torch.nn.functional.adaptive_avg_pool2d(channels_first, 27).permute(1, 2, 0)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-13)


def test_pixels_go_to_minus_one_and_one():
    """0 is -1 and 255 is 1; with the switch each of the three steps is rounded as torch rounds."""
    pixels = np.arange(256, dtype=np.uint8)
    exact = vision.normalise(pixels, CONFIG)
    np.testing.assert_allclose(exact, np.linspace(-1, 1, 256), atol=1e-15)
    theirs = torch.from_numpy(pixels).to(torch.bfloat16).div_(255).sub_(0.5).div_(0.5)
    rounded = vision.normalise(pixels, CONFIG.switched(pixels="bfloat16"))
    np.testing.assert_array_equal(rounded, theirs.double().numpy())


def test_a_patch_is_channel_then_y_then_x():
    """Patch (row, column) has pixel (c, y, x) at c * side^2 + y * side + x."""
    crop = np.random.default_rng(9).standard_normal((12, 8, 3))
    patches = vision.patchify(crop, 4)
    assert patches.shape == (6, 48)
    for row, column, c, y, x in [(0, 0, 0, 0, 0), (1, 0, 2, 3, 1), (2, 1, 1, 0, 3)]:
        pixel = crop[row * 4 + y, column * 4 + x, c]
        assert patches[row * 2 + column, c * 16 + y * 4 + x] == pixel


def test_a_vision_block_is_sequential():
    """The MLP reads what attention has added; attention is bidirectional and torch's."""
    x = np.random.default_rng(10).standard_normal((SMALL.tokens, SMALL.width))
    name = "vision.blocks.1"
    qkv = linear(layer_norm(x, WEIGHTS, f"{name}.ln1"), WEIGHTS, f"{name}.attn.qkv")
    parts = torch.from_numpy(qkv).reshape(-1, 3, SMALL.heads, SMALL.width // SMALL.heads)
    q, k, v = parts.permute(1, 2, 0, 3)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)
    middle = x + linear(heads.reshape(len(x), -1).numpy(), WEIGHTS, f"{name}.attn.proj")
    up = linear(layer_norm(middle, WEIGHTS, f"{name}.ln2"), WEIGHTS, f"{name}.mlp.fc1")
    expected = middle + linear(torch_gelu(up), WEIGHTS, f"{name}.mlp.fc2")
    ours = vision.vision_block(x, 1, CONFIG, WEIGHTS)
    np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_a_crop_goes_through_all_of_the_encoder():
    """Patches get their position's embedding, all blocks in order, and the last norm."""
    crop = noise(SMALL.crop, SMALL.crop)
    x = vision.patchify(vision.normalise(crop, CONFIG), SMALL.patch)
    x = linear(x, WEIGHTS, "vision.patch_emb") + WEIGHTS["vision.pos_emb"][0]
    for layer in range(SMALL.layers):
        x = vision.vision_block(x, layer, CONFIG, WEIGHTS)
    expected = layer_norm(x, WEIGHTS, "vision.post_ln")
    np.testing.assert_array_equal(vision.encode_crop(crop, CONFIG, WEIGHTS), expected)


def test_the_projection_reads_the_whole_before_the_parts():
    """Each cell has the whole image's feature first, then the pooled one of the tiles."""
    rgb = noise(40, 60)
    cut, tiles = vision.crops(rgb, SMALL)
    features = np.stack([vision.encode_crop(crop, CONFIG, WEIGHTS) for crop in cut])
    parts = features[1:].reshape(-1, SMALL.grid, SMALL.grid, SMALL.width)
    local = vision.adaptive_pool(vision.stitch(parts, tiles, SMALL), SMALL.grid)
    both = np.concatenate([features[0], local.reshape(SMALL.tokens, SMALL.width)], axis=1)
    up = torch_gelu(linear(both, WEIGHTS, "vision.proj_mlp.fc1"))
    expected = linear(up, WEIGHTS, "vision.proj_mlp.fc2")
    ours = encode_image(rgb, CONFIG, WEIGHTS)
    assert ours.shape == (SMALL.tokens, CONFIG.text.width)
    np.testing.assert_allclose(ours, expected, atol=1e-12)


def test_the_published_geometry():
    """Crops of 378 pixels give 729 embeddings, in a prefix of 730."""
    config = thin()
    assert (FULL.crop, FULL.window, FULL.overlap, config.image_prefix) == (378, 266, 112, 730)
    embeddings = encode_image(noise(300, 200), config, random_weights(config, 0))
    assert embeddings.shape == (729, config.text.width)
    assert np.all(np.isfinite(embeddings))
