"""Images on the device: resized, cut, normalised and patched; and their features stitched.

Shape legend: N crops, G patches on a side of a crop, T = G * G tokens, P values of a patch, D
vision width, V the 256 levels of a channel.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.images import (
    HEADER_WORDS,
    MAX_WORDS,
    NUM_PIXEL_BYTES,
    PRECISION_BITS,
    TARGET_WORDS,
    CropGeometry,
    HostImage,
    StagedImage,
)

SOURCE = "image_crops.cu"

_BLOCKS = 1056  # eight for each multiprocessor of an H200, for which the kernels are tuned
_THREADS = 256
_STITCH_THREADS = 288


def defines(geometry: CropGeometry) -> dict[str, int]:
    return {
        "GRID": geometry.grid,
        "PATCH": geometry.patch_size,
        "MARGIN": geometry.margin,
        "PRECISION_BITS": PRECISION_BITS,
        "HEADER_WORDS": HEADER_WORDS,
        "TARGET_WORDS": TARGET_WORDS,
    }


class ImagePipeline:
    """One image at a time from pixels to patches, on the current stream, at fixed addresses.

    `levels_V` maps 8-bit levels to any 16-bit dtype, in the model's own arithmetic. Buffers take
    about 100 MB.
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
        """Int32 (rows, columns) of the last upload, at a fixed address."""
        return self._plan[:2]

    def upload(self, host: HostImage, staged: StagedImage) -> None:
        """Enqueue copies of the image's own size, so they cannot be in a shared graph."""
        num_words = staged.num_words
        self._pixels[: staged.pixels.numel()].copy_(staged.pixels, non_blocking=True)
        self._plan[:num_words].copy_(host.plan[:num_words], non_blocking=True)

    def cut(self, patches_NTP: torch.Tensor) -> None:
        """Enqueue the writing of at most N crops of the uploaded image, in the dtype of `levels_V`.

        One graph serves every image: crops that it does not have become zeros. Tokens may be
        strided.
        """
        grid, count, step = (_BLOCKS, 1, 1), patches_NTP.shape[0], patches_NTP.stride(1)
        self._first_pass.launch(grid, _THREADS, (self._pixels, self._plan, self._between))
        operands = (self._between, self._plan, self._levels_V, patches_NTP, step, count)
        self._patches.launch(grid, _THREADS, operands)


class StitchPool:
    """Joins the whole image's features and the stitched and pooled tiles'."""

    def __init__(self, geometry: CropGeometry) -> None:
        self._kernel = Module(SOURCE, defines(geometry)).kernel("stitch_pool")

    def __call__(
        self, features_NTD: torch.Tensor, tiling: torch.Tensor, joined_TD: torch.Tensor
    ) -> None:
        """Enqueue; bfloat16 [N, T, D] with D even, to [T, 2 * D].

        `tiling` is int32 (rows, columns), read when the kernel runs, so one graph serves every
        image. With (1, 1) the whole image is on both sides.
        """
        tokens, dim = features_NTD.shape[1:]
        operands = (features_NTD, tiling, joined_TD, dim // 2)
        self._kernel.launch((tokens, 1, 1), _STITCH_THREADS, operands)
