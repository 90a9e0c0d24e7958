"""Images to patches for Qwen3-VL: sizes, grids and pairs of frames.

Shape legend: P patches, C channels, F frames, Y and X pixels of a patch.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from legato_engine.errors import InvalidField
from legato_engine.models.qwen3_vl.config import TowerConfig

Pixels = npt.NDArray[np.uint8]

_MAX_ASPECT_RATIO = 200


@dataclasses.dataclass(frozen=True, slots=True)
class PatchedImage:
    """A resized image, or two frames, as patches in the order of their tokens (uint8).

    A token is a square of patches, row by row; tokens are row by row, too.
    """

    levels_PCFYX: Pixels
    rows: int  # of patches
    columns: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def num_bytes(self) -> int:
        return self.levels_PCFYX.nbytes


def grid_of(height: int, width: int, config: TowerConfig) -> tuple[int, int]:
    """Return the rows and columns of patches of a resized image.

    They are whole tokens, within the limits of pixels.

    Raises:
        InvalidField: the image is too thin.
    """
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        problem = f"an image of {width} x {height} pixels is too thin for this model, which takes "
        raise InvalidField(f"{problem}up to {_MAX_ASPECT_RATIO} to 1", field="image")
    side = config.side
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        rows, columns = (max(1, math.floor(x / shrink / side)) for x in (height, width))
    elif rows * columns * side**2 < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        rows, columns = (math.ceil(x * grow / side) for x in (height, width))
    return rows * config.merge, columns * config.merge


def patched(image: Image.Image, config: TowerConfig) -> PatchedImage:
    """Resize and cut an RGB image.

    Raises:
        InvalidField: the image is too thin.
    """
    rows, columns = grid_of(image.height, image.width, config)
    size, merge = config.patch_size, config.merge
    resized = image.resize((columns * size, rows * size), Image.Resampling.BICUBIC)
    blocks = rows // merge, merge, size, columns // merge, merge, size, 3
    cut = np.asarray(resized).reshape(blocks).transpose(0, 3, 1, 4, 6, 2, 5)
    shape = rows * columns, 3, 1, size, size
    return PatchedImage(np.ascontiguousarray(cut).reshape(shape), rows, columns)


def joined(first: PatchedImage, second: PatchedImage) -> PatchedImage:
    """Join two frames of one size, which share their tokens."""
    levels_PCFYX = np.concatenate([first.levels_PCFYX, second.levels_PCFYX], axis=2)
    return PatchedImage(levels_PCFYX, first.rows, first.columns)
