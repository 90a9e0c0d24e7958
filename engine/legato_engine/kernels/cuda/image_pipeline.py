"""Pictures on the device: resized, cut, normalised and patched; and their features stitched.

Shape legend: H, W and C rows, columns and channels of a picture, N crops, G patches on a side of a
crop, T = G * G tokens, P values of a patch, D vision width, V the 256 levels of a channel.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.cut_plan import (
    HEADER_WORDS,
    MAX_WORDS,
    TARGET_WORDS,
    CropGeometry,
)
from legato_engine.kernels.image_staging import NUM_PIXEL_BYTES, HostImage, StagedImage
from legato_engine.kernels.lanczos import PRECISION_BITS

SOURCE = "image_crops.cu"

_BLOCKS = 1056  # eight for each of the 132 multiprocessors of the device that these are tuned for
_THREADS = 256
_STITCH_THREADS = 288


def defines(geometry: CropGeometry) -> dict[str, int]:
    """The constants of `SOURCE`."""
    return {
        "GRID": geometry.grid,
        "PATCH": geometry.patch_size,
        "MARGIN": geometry.margin,
        "PRECISION_BITS": PRECISION_BITS,
        "HEADER_WORDS": HEADER_WORDS,
        "TARGET_WORDS": TARGET_WORDS,
    }


class ImagePipeline:
    """One picture at a time from pixels to patches, on the current stream, at fixed addresses.

    `levels_V` is what each 8-bit level becomes, in any 16-bit dtype: the model's own arithmetic,
    done once on the device. Holds room for the largest picture twice and its plan, about 100 MB.
    """

    def __init__(self, geometry: CropGeometry, levels_V: torch.Tensor) -> None:
        module = Module(SOURCE, defines(geometry))
        self._first_pass = module.kernel("image_first_pass")
        self._patches = module.kernel("image_patches")
        self._levels_V = levels_V.contiguous()
        device = levels_V.device
        self._pixels = torch.empty(NUM_PIXEL_BYTES, dtype=torch.uint8, device=device)
        self._between = torch.empty(NUM_PIXEL_BYTES, dtype=torch.uint8, device=device)
        self._plan = torch.zeros(MAX_WORDS, dtype=torch.int32, device=device)

    @property
    def tiling(self) -> torch.Tensor:
        """Int32 (rows, columns) of the picture uploaded last; its address never changes."""
        return self._plan[:2]

    def upload(self, host: HostImage, staged: StagedImage) -> None:
        """Enqueue two copies, as long as the picture needs; no part of a graph for all pictures."""
        num_words = staged.num_words
        self._pixels[: staged.pixels.numel()].copy_(staged.pixels, non_blocking=True)
        self._plan[:num_words].copy_(host.plan[:num_words], non_blocking=True)

    def cut(self, patches_NTP: torch.Tensor) -> None:
        """Enqueue two kernels that write every crop of the uploaded picture, in `levels_V`'s dtype.

        One graph serves every picture: crops beyond the picture's own become zeros, and of a
        picture with more crops than N the first N are written. Tokens may be further apart than P.
        """
        grid, count, step = (_BLOCKS, 1, 1), patches_NTP.shape[0], patches_NTP.stride(1)
        self._first_pass.launch(grid, _THREADS, (self._pixels, self._plan, self._between))
        operands = (self._between, self._plan, self._levels_V, patches_NTP, step, count)
        self._patches.launch(grid, _THREADS, operands)


class StitchPool:
    """Features of crops to one grid: the whole picture's beside the stitched and pooled tiles'."""

    def __init__(self, geometry: CropGeometry) -> None:
        self._kernel = Module(SOURCE, defines(geometry)).kernel("stitch_pool")

    def __call__(
        self, features_NTD: torch.Tensor, tiling: torch.Tensor, joined_TD: torch.Tensor
    ) -> None:
        """Enqueue; bfloat16 [N, T, D] with D even, to [T, 2 * D].

        `tiling` is int32 (rows, columns) on the device, read when the kernel runs, so one graph
        serves every picture. With (1, 1) the whole picture stands on both sides.
        """
        tokens, dim = features_NTD.shape[1:]
        operands = (features_NTD, tiling, joined_TD, dim // 2)
        self._kernel.launch((tokens, 1, 1), _STITCH_THREADS, operands)
