"""Pillow's Lanczos resize of 8-bit images, bit for bit: fixed-point weights, two passes.

Pixels between the passes are rounded to 8 bits, so their order matters: that of Pillow 13.

Shape legend: H, W and C rows, columns and channels, O pixels of an axis after the resize, K weights
of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

PRECISION_BITS = 22
"""Fraction bits of a weight: pixels of 8 bits times weights up to 2 in magnitude fit an int32."""

_SUPPORT = 3.0
_CACHED_TABLES = 256


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The resize of one axis: pixel o is the sum of `counts_O[o]` pixels from `starts_O[o]` on.

    Arrays are int32, and read-only because they are shared. `weights_OK` has `PRECISION_BITS`
    fraction bits, and zeros from `counts_O` on.
    """

    starts_O: npt.NDArray[np.int32]
    counts_O: npt.NDArray[np.int32]
    weights_OK: npt.NDArray[np.int32]


def num_weights(size_in: int, size_out: int) -> int:
    """K of `table(size_in, size_out)`."""
    if size_in == size_out:
        return 1
    return 2 * math.ceil(_SUPPORT * max(size_in / size_out, 1.0)) + 1


@functools.lru_cache(maxsize=_CACHED_TABLES)
def table(size_in: int, size_out: int) -> Table:
    """Weights between sizes of at least 1; equal ones copy, like a skipped pass."""
    starts_O = np.arange(size_out)
    counts_O = np.ones(size_out, np.int64)
    weights_OK = np.ones((size_out, 1))
    if size_in != size_out:
        starts_O, counts_O, weights_OK = _weights(size_in, size_out)
    fixed_OK = weights_OK * (1 << PRECISION_BITS)
    rounded_OK = np.trunc(fixed_OK + np.copysign(0.5, fixed_OK))
    arrays = [array.astype(np.int32) for array in (starts_O, counts_O, rounded_OK)]
    for array in arrays:
        array.setflags(write=False)
    return Table(*arrays)


def rows_first(height: int, width: int, to_height: int, to_width: int) -> bool:
    """Whether Pillow resizes the height first."""
    return height - to_height > max(0, 2 * (width - to_width))


def resize(image_HWC: Pixels, height: int, width: int) -> Pixels:
    """Resize as `PIL.Image.resize` with `LANCZOS` does; the reference."""
    from_height, from_width = image_HWC.shape[:2]
    if rows_first(from_height, from_width, height, width):
        return _resize_width(_resize_height(image_HWC, height), width)
    return _resize_height(_resize_width(image_HWC, width), height)


def _weights(
    size_in: int, size_out: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The order of operations affects the bits."""
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    centres_O = (np.arange(size_out) + 0.5) * scale
    starts_O = np.maximum((centres_O - support + 0.5).astype(np.int64), 0)
    ends_O = np.minimum((centres_O + support + 0.5).astype(np.int64), size_in)
    counts_O = ends_O - starts_O
    taps_K = np.arange(num_weights(size_in, size_out))
    distances_OK = ((taps_K + starts_O[:, None]) - centres_O[:, None] + 0.5) * (1.0 / stretch)
    weights_OK = np.where(taps_K < counts_O[:, None], _lanczos(distances_OK), 0.0)
    sums_O = np.cumsum(weights_OK, axis=1)[:, -1]  # a running sum, not a pairwise one
    return starts_O, counts_O, weights_OK / np.where(sums_O == 0.0, 1.0, sums_O)[:, None]


def _lanczos(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = (x >= -_SUPPORT) & (x < _SUPPORT)
    return np.where(inside, _sinc(x) * _sinc(x / _SUPPORT), 0.0)


def _sinc(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    angle = np.where(x == 0.0, 1.0, x * math.pi)
    return np.where(x == 0.0, 1.0, np.sin(angle) / angle)


def _resize_width(image_HWC: Pixels, width: int) -> Pixels:
    return _resize_height(image_HWC.swapaxes(0, 1), width).swapaxes(0, 1)


def _resize_height(image_HWC: Pixels, height: int) -> Pixels:
    """Sums are int32, as in Pillow and on the device."""
    weights = table(image_HWC.shape[0], height)
    last = image_HWC.shape[0] - 1
    shape = (height, *image_HWC.shape[1:])
    sums_OWC = np.full(shape, 1 << (PRECISION_BITS - 1), np.int32)
    for tap, weights_O in enumerate(weights.weights_OK.T):
        taken_OWC = image_HWC[np.minimum(weights.starts_O + tap, last)]
        sums_OWC += taken_OWC * weights_O[:, None, None]
    return (sums_OWC >> PRECISION_BITS).clip(0, 255).astype(np.uint8)
