"""Pictures to crops: how many tiles, and which pixels each of them sees.

Shape legend: N crops, H and W pixels, C channels.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from legato_engine.kernels.cut_plan import CropGeometry, CutPlan
from legato_engine.models.moondream.config import VisionConfig

Pixels = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class CroppedImage:
    """A picture as the vision tower takes it.

    `pixels_NHWC` uint8 RGB: the whole picture first, then `tiling` (rows, columns) tiles row by
    row. A tiling of (1, 1) is the whole picture alone, for its only tile would be the same.
    `picture` [H, W, C] is what they were cut from, where it is kept.
    """

    pixels_NHWC: Pixels
    tiling: tuple[int, int]
    picture: Pixels | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        kept = 0 if self.picture is None else self.picture.nbytes
        return self.pixels_NHWC.nbytes + kept


@dataclasses.dataclass(frozen=True, slots=True)
class WholeImage:
    """A picture that the device resizes and cuts, by `plan`: uint8 RGB as decoded."""

    pixels_HWC: Pixels
    plan: CutPlan

    @property
    def picture(self) -> Pixels:
        """As in `CroppedImage`: always kept."""
        return self.pixels_HWC

    @property
    def tiling(self) -> tuple[int, int]:
        """Rows and columns of tiles, as in `CroppedImage`."""
        return self.plan.tiling

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        return self.pixels_HWC.nbytes


def select_tiling(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Rows and columns of tiles for a picture, at most `max_crops` of them.

    The rule is the one that the model was trained with. In pictures thinner than about 1 to 20 it
    keeps one row and goes beyond `max_crops`, by the square root of the thinness.
    """
    if config.max_crops <= 1:
        return (1, 1)
    window, limit = config.window, config.max_crops
    margins = 2 * config.overlap_margin * config.patch_size
    height, width = max(1, height - margins), max(1, width - margins)
    if height <= window or width <= window:
        return (1, 1)
    rows, columns = math.ceil(height / window), math.ceil(width / window)
    if rows * columns > limit:
        ratio = math.sqrt(limit / (rows * columns))
        return max(1, math.floor(rows * ratio)), max(1, math.floor(columns * ratio))
    rows = max(math.floor(math.sqrt(limit * height / width)), rows)
    columns = max(math.floor(math.sqrt(limit * width / height)), columns)
    if rows * columns > limit:
        if columns > rows:
            columns = limit // rows
        else:
            rows = limit // columns
    return max(1, rows), max(1, columns)


def crop_geometry(config: VisionConfig) -> CropGeometry:
    """The sizes that the device's kernels cut by."""
    return CropGeometry(config.crop_size, config.patch_size, config.overlap_margin)


def most_crops(config: VisionConfig) -> int:
    """Crops of one image that the device has room for; a few very thin ones have more."""
    return 1 + config.max_crops if config.max_crops > 1 else 1


def whole_picture(pixels_HWC: Pixels, config: VisionConfig) -> WholeImage | None:
    """The picture for the device to cut; None when it has no room for the size or the crops."""
    height, width = pixels_HWC.shape[:2]
    plan = CutPlan(height, width, select_tiling(height, width, config), crop_geometry(config))
    if plan.num_crops > most_crops(config) or not plan.fits:
        return None
    return WholeImage(pixels_HWC, plan)


def crop_image(image: Image.Image, config: VisionConfig) -> CroppedImage:
    """Cut an RGB picture; every tile shares `overlap_margin` patches with its neighbours."""
    size, window = config.crop_size, config.window
    margins = 2 * config.overlap_margin * config.patch_size
    rows, columns = select_tiling(image.height, image.width, config)
    crops = [_resized(image, size, size)]
    if (rows, columns) != (1, 1):
        canvas_HWC = _resized(image, rows * window + margins, columns * window + margins)
        crops += [
            canvas_HWC[top : top + size, left : left + size]
            for top in range(0, rows * window, window)
            for left in range(0, columns * window, window)
        ]
    return CroppedImage(np.stack(crops), (rows, columns))


def _resized(image: Image.Image, height: int, width: int) -> Pixels:
    return np.array(image.resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)
