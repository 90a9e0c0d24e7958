"""The refiner's input, and the outline of its result.

Shape legend: H, W pixels of an image or crop, S side of the refiner's input.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from legato_engine.core.geometry import Box
from legato_engine.core.results import Outline
from legato_engine.models.moondream.outlines import curves, paths, rings
from legato_engine.models.moondream.outlines.rings import Mask
from legato_engine.models.moondream.preprocess import Pixels

Values = npt.NDArray[np.float32]

_MARGIN = 0.25  # of the box, on each side
_SAMPLES = 3  # of a pixel, along each side of it
_FINENESS = 2  # traced pixels, at most, per pixel of the result along each side
_MIN_SHARE = 0.0015  # of the image; smaller islands and holes are dropped
_TOLERANCE = 0.75  # pixels of the crop, or of the refiner's input if that is coarser
_DIGITS = 4


class NotRefinable(Exception):
    """The outline cannot be refined, or the refined mask has no outline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crop:
    """`extent` (height, width) pixels from (`left`, `top`) of an image of `size`.

    `pixels_SSC` (uint8 RGB) and `mask_SS` (uint8, 0 or 1) are the refiner's input.
    """

    size: tuple[int, int]
    left: int
    top: int
    extent: tuple[int, int]
    pixels_SSC: Pixels
    mask_SS: Pixels


def cut(outline: Outline, image_HWC: Pixels, side: int) -> Crop:
    """Cut out the outline's box with a margin, and draw its mask."""
    height, width = image_HWC.shape[:2]
    box = outline.box
    left, right = _grown(box.x_min, box.x_max, width)
    top, bottom = _grown(box.y_min, box.y_max, height)
    extent = (bottom - top, right - left)
    if min(extent) < 1:
        raise NotRefinable("the outline's box is empty")
    # The crop's pixels that the input samples.
    rows, columns = (np.arange(side) * count // side for count in extent)
    mask_SS = _drawn(outline, (height, width), rows + top, columns + left)
    if not mask_SS.any():
        raise NotRefinable("the outline encloses nothing")
    part_HWC = image_HWC[top:bottom, left:right]
    return Crop(
        size=(height, width),
        left=left,
        top=top,
        extent=extent,
        pixels_SSC=np.rint(resized(part_HWC, (side, side))).astype(np.uint8),
        mask_SS=mask_SS.astype(np.uint8),
    )


def outlined(label: str, crop: Crop, share_SS: Values) -> Outline:
    """Trace the refiner's result, the probability of each pixel."""
    if not np.isfinite(share_SS).all():
        raise NotRefinable("the refiner's mask is not finite")
    height, width = crop.size
    side = share_SS.shape[0]
    traced = tuple(min(count, _FINENESS * side) for count in crop.extent)
    pixels = np.array(
        [crop.extent[1] / traced[1], crop.extent[0] / traced[0]]
    )  # per traced pixel, x and y
    mask_HW = resized(share_SS, traced) > 0.5
    mask_HW = rings.cleaned(mask_HW, max(1.0, _MIN_SHARE * height * width / pixels.prod()))
    ys, xs = (np.flatnonzero(mask_HW.any(axis=axis)) for axis in (1, 0))
    if not len(ys):
        raise NotRefinable("the refiner's mask is empty")
    low, high = np.array([xs[0], ys[0]]), np.array([xs[-1], ys[-1]]) + 1
    tolerance = _TOLERANCE * max(1.0, max(traced) / side)
    drawn = [curves.fit(ring, tolerance) for ring in rings.trace(mask_HW)]
    corner, size = np.array([crop.left, crop.top]), np.array([width, height])
    (x_min, y_min), (x_max, y_max) = (
        ((corner + at * pixels) / size).tolist() for at in (low, high)
    )
    box = Box(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max)
    path = " ".join(_text(curve, low, high - low) for curve in drawn)
    return Outline(path=path, box=box, label=label, coarse=False)


def resized(values: npt.NDArray[np.generic], size: tuple[int, int]) -> Values:
    """Interpolate linearly between pixel centres, without antialiasing."""
    result = values
    for axis in range(2):
        count = values.shape[axis]
        position = (np.arange(size[axis]) + 0.5) * (count / size[axis]) - 0.5
        position = np.clip(position, 0, count - 1)
        first = np.minimum(position.astype(np.int64), max(count - 2, 0))
        shape = [1] * values.ndim
        shape[axis] = -1
        share = (position - first).astype(np.float32).reshape(shape)
        near = np.take(result, first, axis).astype(np.float32)
        far = np.take(result, np.minimum(first + 1, count - 1), axis).astype(np.float32)
        result = near + (far - near) * share
    return result.astype(np.float32, copy=False)


def _grown(low: float, high: float, count: int) -> tuple[int, int]:
    low, high = low * count, high * count
    margin = (high - low) * _MARGIN
    return max(0, int(low - margin)), min(count, int(high + margin))


def _drawn(
    outline: Outline,
    size: tuple[int, int],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
) -> Mask:
    """Mark pixels that the outline covers by more than half."""
    box, extent = outline.box, (size[1], size[0])
    low = np.array([box.x_min, box.y_min]) * extent
    stretch = np.array([box.x_max, box.y_max]) * extent - low
    samples = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    xs, ys = ((pixels[:, None] + samples).ravel() for pixels in (columns, rows))
    polygons = [ring * stretch + low for ring in paths.polygons(outline.path)]
    within = paths.enclosed(polygons, xs, ys).reshape(len(rows), _SAMPLES, len(columns), _SAMPLES)
    mask: Mask = within.sum(axis=(1, 3), dtype=np.int8) > _SAMPLES * _SAMPLES // 2
    return mask


def _text(curve: curves.Curve, corner: npt.NDArray[np.int64], extent: npt.NDArray[np.int64]) -> str:
    def written(points: curves.Points) -> str:
        shares = (points - corner) / extent
        return " ".join(f"{_number(x)},{_number(y)}" for x, y in shares.tolist())

    strokes = (
        f"{'L' if stroke.is_line else 'C'} {written(stroke.points)}" for stroke in curve.strokes
    )
    return " ".join([f"M {written(curve.start[None])}", *strokes, "z"])


def _number(value: float) -> str:
    text = f"{value:.{_DIGITS}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
