"""Images cut into crops, and their features stitched."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.reference.moondream3.config import VisionConfig
from tests.reference.moondream3.numerics import Array

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
