"""Image resizing and cropping: Pillow's Lanczos weights, cut plans, and their pinned memory.

Pixels between the passes are rounded to 8 bits, so their order matters: that of Pillow 13.

Shape legend: H, W and C rows, columns and channels, O pixels of an axis after the resize, K weights
of each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch  # frontends plan cuts without it

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
    """Return whether Pillow resizes the height first."""
    return height - to_height > max(0, 2 * (width - to_width))


def _weights(
    size_in: int, size_out: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return each output's first input, tap count and weights, in Pillow's order of operations."""
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


# ---------------------------------------------------------------- cut plan

# The plan by which the device cuts one image.
#
# One small copy brings its int32 words to the device, and the kernels' launches are the same for
# every image. The words, by index:
#
#     0 rows of tiles, 1 columns of tiles, 2 width of the image, 3 crops;
#     from `HEADER_WORDS`: the target "whole image", and `TARGET_WORDS` later the target "canvas".
#
# A target is the image resized by two passes:
#
#     0, 1 height and width between the passes (0, 0: no such target), 2 whether the first pass
#     resizes the height; 3, 4 the first pass's table and its number of pixels, 5 its weights per
#     pixel; 6, 7, 8 the same for the second pass.
#
# A table is the starts, counts and weights of a `Table`.

HEADER_WORDS = 4
TARGET_WORDS = 9

MAX_PIXELS = 4096 * 4096
"""Maximum pixels of an image, and between the passes of both targets together."""

MAX_WORDS = 1 << 18
"""The largest plan; weights grow with the longer side of an image."""

_TABLES_AT = HEADER_WORDS + 2 * TARGET_WORDS


@dataclasses.dataclass(frozen=True, slots=True)
class CropGeometry:
    """Pixels of a crop and of a patch, and patches that tiles overlap by."""

    crop_size: int
    patch_size: int
    margin: int

    @property
    def grid(self) -> int:
        return self.crop_size // self.patch_size

    def canvas_size(self, tiles: int) -> int:
        margins = 2 * self.margin * self.patch_size
        return tiles * (self.crop_size - margins) + margins


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One resize of the whole image."""

    height: int
    width: int
    to_height: int
    to_width: int

    @property
    def rows_first(self) -> bool:
        return rows_first(self.height, self.width, self.to_height, self.to_width)

    @property
    def passes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sizes before and after each pass, of its axis."""
        rows, columns = (self.height, self.to_height), (self.width, self.to_width)
        return (rows, columns) if self.rows_first else (columns, rows)

    @property
    def intermediate_size(self) -> tuple[int, int]:
        return (self.to_height, self.width) if self.rows_first else (self.height, self.to_width)


@dataclasses.dataclass(frozen=True, slots=True)
class CutPlan:
    """An image cut to itself and (rows, columns) of tiles; (1, 1) has no tiles."""

    height: int
    width: int
    tiling: tuple[int, int]
    geometry: CropGeometry

    @property
    def num_crops(self) -> int:
        rows, columns = self.tiling
        return 1 if self.tiling == (1, 1) else 1 + rows * columns

    @property
    def targets(self) -> tuple[Target, ...]:
        side = self.geometry.crop_size
        sizes = [(side, side)]
        if self.tiling != (1, 1):
            rows, columns = self.tiling
            sizes.append((self.geometry.canvas_size(rows), self.geometry.canvas_size(columns)))
        return tuple(Target(self.height, self.width, *size) for size in sizes)

    @property
    def num_words(self) -> int:
        return _TABLES_AT + sum(
            size_out * (2 + num_weights(size_in, size_out))
            for target in self.targets
            for size_in, size_out in target.passes
        )

    @property
    def fits(self) -> bool:
        """Return whether the plan and its pixels fit the device's buffers."""
        pixels = sum(
            height * width for height, width in (t.intermediate_size for t in self.targets)
        )
        largest = max(self.height * self.width, pixels)
        return largest <= MAX_PIXELS and self.num_words <= MAX_WORDS

    def write(self, words_N: npt.NDArray[np.int32]) -> int:
        """Return `num_words`."""
        own_N = _words(self)
        words_N[: own_N.size] = own_N
        return own_N.size


@functools.lru_cache(maxsize=64)
def _words(plan: CutPlan) -> npt.NDArray[np.int32]:
    """Encode a plan for the kernel; cached because a camera's images share one plan."""
    words_N = np.zeros(plan.num_words, np.int32)
    words_N[:HEADER_WORDS] = (*plan.tiling, plan.width, plan.num_crops)
    at = _TABLES_AT
    for index, target in enumerate(plan.targets):
        words = [*target.intermediate_size, int(target.rows_first)]
        for size_in, size_out in target.passes:
            weights = table(size_in, size_out)
            words += [at, size_out, weights.weights_OK.shape[1]]
            for array in (weights.starts_O, weights.counts_O, weights.weights_OK):
                words_N[at : at + array.size] = array.ravel()
                at += array.size
        start = HEADER_WORDS + index * TARGET_WORDS
        words_N[start : start + TARGET_WORDS] = words
    return words_N


# ---------------------------------------------------------------- pinned memory

NUM_PIXEL_BYTES = 3 * MAX_PIXELS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HostImage:
    """Pinned memory for one image, allocated by the caller.

    `pixels` uint8 [NUM_PIXEL_BYTES], `plan` int32 [MAX_WORDS]. `stage` may fill both again after
    the copies of `ImagePipeline.upload`.
    """

    pixels: torch.Tensor
    plan: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StagedImage:
    """An image's pinned `pixels` and its plan's words; outlives `ImagePipeline.upload`'s copies."""

    pixels: torch.Tensor
    num_words: int


def stage(pixels_HWC: npt.NDArray[np.uint8], plan: CutPlan, host: HostImage) -> StagedImage:
    """Write an image's plan, which has to fit, and its pixels unless they are pinned already."""
    import torch

    num_words = plan.write(host.plan.numpy())
    if pixels_HWC.flags.writeable and pixels_HWC.flags.c_contiguous:
        own = torch.from_numpy(pixels_HWC).flatten()
        if own.is_pinned():
            return StagedImage(own, num_words)
    pixels = host.pixels[: pixels_HWC.size]
    np.copyto(pixels.numpy().reshape(pixels_HWC.shape), pixels_HWC)
    return StagedImage(pixels, num_words)
