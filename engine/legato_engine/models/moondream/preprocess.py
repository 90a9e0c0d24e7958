"""Images to crops.

Shape legend: N crops, H, W pixels, C channels.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from legato_engine.kernels.images import CropGeometry, CutPlan
from legato_engine.models.moondream.config import VisionConfig

Pixels = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class CroppedImage:
    """An image as crops for the vision encoder.

    `pixels_NHWC` (uint8 RGB): the whole image, then `tiling` (rows, columns) tiles row by row; with
    (1, 1) no tile, because it would be the whole image again. `original` [H, W, C]: if kept.
    """

    pixels_NHWC: Pixels
    tiling: tuple[int, int]
    original: Pixels | None = None

    @property
    def num_bytes(self) -> int:
        kept = 0 if self.original is None else self.original.nbytes
        return self.pixels_NHWC.nbytes + kept


@dataclasses.dataclass(frozen=True, slots=True)
class WholeImage:
    """A decoded image (uint8 RGB) that the device resizes and cuts by `plan`."""

    pixels_HWC: Pixels
    plan: CutPlan

    @property
    def original(self) -> Pixels:
        return self.pixels_HWC

    @property
    def tiling(self) -> tuple[int, int]:
        return self.plan.tiling

    @property
    def num_bytes(self) -> int:
        return self.pixels_HWC.nbytes


def select_tiling(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Choose rows and columns of tiles, by the rule that the model was trained with.

    Up to `max_crops`, but more in one row of an image thinner than about 1 to 20.
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
    return CropGeometry(config.crop_size, config.patch_size, config.overlap_margin)


def max_crops_of(config: VisionConfig) -> int:
    """Crops that the device has buffers for; thin images may have more."""
    return 1 + config.max_crops if config.max_crops > 1 else 1


def whole_image(pixels_HWC: Pixels, config: VisionConfig) -> WholeImage | None:
    """Plan cutting on the device; None if its buffers are too small."""
    height, width = pixels_HWC.shape[:2]
    plan = CutPlan(height, width, select_tiling(height, width, config), crop_geometry(config))
    if plan.num_crops > max_crops_of(config) or not plan.fits:
        return None
    return WholeImage(pixels_HWC, plan)


def crop_image(image: Image.Image, config: VisionConfig) -> CroppedImage:
    """Cut an RGB image; tiles have margins of `overlap_margin` patches."""
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
