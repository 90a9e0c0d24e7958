"""The plan by which the device cuts one image.

One small copy brings its int32 words to the device, and the kernels' launches are the same for
every image. The words, by index:

    0 rows of tiles, 1 columns of tiles, 2 width of the image, 3 crops;
    from `HEADER_WORDS`: the target "whole image", and `TARGET_WORDS` later the target "canvas".

A target is the image resized by two passes:

    0, 1 height and width between the passes (0, 0: no such target), 2 whether the first pass
    resizes the height; 3, 4 the first pass's table and its number of pixels, 5 its weights per
    pixel; 6, 7, 8 the same for the second pass.

A table is the starts, counts and weights of a `kernels.lanczos.Table`.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from legato_engine.kernels import lanczos

HEADER_WORDS = 4
TARGET_WORDS = 9

MAX_PIXELS = 4096 * 4096
"""The largest image, and the most pixels between the passes of both targets together."""

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
        return lanczos.rows_first(self.height, self.width, self.to_height, self.to_width)

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
            size_out * (2 + lanczos.num_weights(size_in, size_out))
            for target in self.targets
            for size_in, size_out in target.passes
        )

    @property
    def fits(self) -> bool:
        """Whether the plan and its pixels fit the device's buffers."""
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
    """Cached because a camera's images share one plan."""
    words_N = np.zeros(plan.num_words, np.int32)
    words_N[:HEADER_WORDS] = (*plan.tiling, plan.width, plan.num_crops)
    at = _TABLES_AT
    for index, target in enumerate(plan.targets):
        words = [*target.intermediate_size, int(target.rows_first)]
        for size_in, size_out in target.passes:
            table = lanczos.table(size_in, size_out)
            words += [at, size_out, table.weights_OK.shape[1]]
            for array in (table.starts_O, table.counts_O, table.weights_OK):
                words_N[at : at + array.size] = array.ravel()
                at += array.size
        start = HEADER_WORDS + index * TARGET_WORDS
        words_N[start : start + TARGET_WORDS] = words
    return words_N
