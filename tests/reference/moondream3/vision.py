"""From pixels to the embeddings that follow BOS."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.reference.moondream3.config import Config, VisionConfig
from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    attend,
    gelu_tanh,
    layer_norm,
    linear,
    round_bfloat16,
    split_heads,
    weight,
)

# ---------------------------------------------------------------- tiling
# Images cut into crops, and their features stitched.

Pixels = NDArray[np.uint8]


def choose_tiling(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """(rows, columns) of crops for an image of so many pixels."""
    h, w, tile = height - vision.overlap, width - vision.overlap, vision.window
    if h <= tile or w <= tile:
        return 1, 1
    least_rows, least_columns = math.ceil(h / tile), math.ceil(w / tile)
    if least_rows * least_columns > vision.max_crops:
        ratio = math.sqrt(vision.max_crops / (least_rows * least_columns))
        return max(1, math.floor(least_rows * ratio)), max(1, math.floor(least_columns * ratio))
    rows = max(math.floor(math.sqrt(vision.max_crops * h / w)), least_rows)
    columns = max(math.floor(math.sqrt(vision.max_crops * w / h)), least_columns)
    if rows * columns > vision.max_crops:
        if columns > rows:
            columns = vision.max_crops // rows
        else:
            rows = vision.max_crops // columns
    return max(1, rows), max(1, columns)


def resize(rgb: Pixels, height: int, width: int) -> Pixels:
    """Lanczos with antialiasing, rounded to uint8; the aspect is not kept."""
    resized = Image.fromarray(rgb).resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(resized)


def crops(rgb: Pixels, vision: VisionConfig) -> tuple[Pixels, tuple[int, int]]:
    """[1 + rows * columns, crop, crop, 3]: the whole image, then its tiles; and (rows, columns).

    Raises:
        ValueError: `rgb` is not uint8 [height, width, 3].
    """
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        raise ValueError(f"rgb is {rgb.dtype} {rgb.shape}, not uint8 [height, width, 3]")
    rows, columns = choose_tiling(rgb.shape[0], rgb.shape[1], vision)
    window, crop = vision.window, vision.crop
    large = resize(rgb, rows * window + vision.overlap, columns * window + vision.overlap)
    tiles = [
        large[row * window : row * window + crop, column * window : column * window + crop]
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack([resize(rgb, crop, crop), *tiles]), (rows, columns)


def _kept(index: int, count: int, vision: VisionConfig) -> range:
    """The patches along one side of a crop that the stitched grid takes from it."""
    first = 0 if index == 0 else vision.margin
    end = vision.grid if index == count - 1 else vision.grid - vision.margin
    return range(first, end)


def stitch(tiles: Array, tiling: tuple[int, int], vision: VisionConfig) -> Array:
    """Tiles [rows * columns, grid, grid, D] to one grid of rows * inside + 2 * margin by the same.

    Outer tiles keep their outer margin, inner margins are dropped, and nothing is blended.
    """
    rows, columns = tiling
    inside = vision.grid - 2 * vision.margin
    extent = (rows * inside + 2 * vision.margin, columns * inside + 2 * vision.margin)
    stitched = np.full((*extent, tiles.shape[-1]), np.nan)
    for row in range(rows):
        for column in range(columns):
            tile = tiles[row * columns + column]
            for y in _kept(row, rows, vision):
                for x in _kept(column, columns, vision):
                    stitched[row * inside + y, column * inside + x] = tile[y, x]
    return stitched


def _pooling_matrix(length: int, out: int) -> Array:
    """[out, length]: row k is the mean over floor(k n / out) .. ceil((k + 1) n / out)."""
    matrix = np.zeros((out, length))
    for k in range(out):
        start, end = k * length // out, -(-(k + 1) * length // out)
        matrix[k, start:end] = 1 / (end - start)
    return matrix


def adaptive_pool(features: Array, out: int) -> Array:
    """[rows, columns, D] averaged to [out, out, D], by windows that may overlap."""
    over_rows = np.einsum("kr,rcd->kcd", _pooling_matrix(features.shape[0], out), features)
    return np.einsum("lc,kcd->kld", _pooling_matrix(features.shape[1], out), over_rows)


# ---------------------------------------------------------------- vision
# From pixels to the embeddings that follow BOS.
#
# Shapes: C crops, P patches of a crop, D the encoder's width, K dims of a head.


def normalise(pixels: Pixels, config: Config) -> Array:
    """0..255 to -1..1, exactly or with a rounding after each of the three steps."""
    x = pixels.astype(np.float64)
    if config.switches.pixels == "exact":
        return (x / 255 - 0.5) / 0.5
    return round_bfloat16(round_bfloat16(round_bfloat16(x / 255) - 0.5) / 0.5)


def patchify(crop: Array, patch: int) -> Array:
    """[height, width, 3] to [P, 3 * patch * patch]: by rows; within a patch the channel, y, x."""
    rows, columns = crop.shape[0] // patch, crop.shape[1] // patch
    patches = [
        crop[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        .transpose(2, 0, 1)
        .reshape(-1)
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack(patches)


def _attention(x_PD: Array, heads: int, weights: Weights, name: str) -> Array:
    q_PD, k_PD, v_PD = np.split(linear(x_PD, weights, f"{name}.qkv"), 3, axis=-1)
    q, k, v = (split_heads(part, heads) for part in (q_PD, k_PD, v_PD))
    everything = np.ones((len(x_PD), len(x_PD)), bool)
    return linear(attend(q, k, v, everything), weights, f"{name}.proj")


def vision_block(x_PD: Array, layer: int, config: Config, weights: Weights) -> Array:
    """Attention, then the MLP on what it left, each with a norm before and a sum after it."""
    block = f"vision.blocks.{layer}"
    normed = layer_norm(x_PD, weights, f"{block}.ln1")
    x_PD = x_PD + _attention(normed, config.vision.heads, weights, f"{block}.attn")
    normed = layer_norm(x_PD, weights, f"{block}.ln2")
    hidden = gelu_tanh(linear(normed, weights, f"{block}.mlp.fc1"))
    return x_PD + linear(hidden, weights, f"{block}.mlp.fc2")


def encode_crop(crop: Pixels, config: Config, weights: Weights) -> Array:
    """uint8 [crop, crop, 3] to features [P, D]. Crops never see each other."""
    patches = patchify(normalise(crop, config), config.vision.patch)
    x_PD = linear(patches, weights, "vision.patch_emb") + weight(weights, "vision.pos_emb")[0]
    for layer in range(config.vision.layers):
        x_PD = vision_block(x_PD, layer, config, weights)
    return layer_norm(x_PD, weights, "vision.post_ln")


def project(
    features_CPD: Array, tiling: tuple[int, int], config: Config, weights: Weights
) -> Array:
    """Features of all crops, the whole image's first, to embeddings [P, width of the text]."""
    vision = config.vision
    whole_PD, tiles_CPD = features_CPD[0], features_CPD[1:]
    tiles = tiles_CPD.reshape(-1, vision.grid, vision.grid, vision.width)
    local = adaptive_pool(stitch(tiles, tiling, vision), vision.grid)
    both = np.concatenate([whole_PD, local.reshape(-1, vision.width)], axis=-1)
    hidden = gelu_tanh(linear(both, weights, "vision.proj_mlp.fc1"))
    return linear(hidden, weights, "vision.proj_mlp.fc2")


def encode_image(rgb: Pixels, config: Config, weights: Weights) -> Array:
    """uint8 [height, width, 3] to embeddings [grid * grid, width of the text model].

    Raises:
        ValueError: `rgb` is of another type or shape.
    """
    cut, tiling = crops(rgb, config.vision)
    features_CPD = np.stack([encode_crop(crop, config, weights) for crop in cut])
    return project(features_CPD, tiling, config, weights)
