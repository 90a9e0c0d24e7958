"""Images on their way to the device, in pinned memory.

Shape legend: H, W and C rows, columns and channels of an image.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from legato_engine.kernels.images import MAX_PIXELS, CutPlan

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
    num_words = plan.write(host.plan.numpy())
    if pixels_HWC.flags.writeable and pixels_HWC.flags.c_contiguous:
        own = torch.from_numpy(pixels_HWC).flatten()
        if own.is_pinned():
            return StagedImage(own, num_words)
    pixels = host.pixels[: pixels_HWC.size]
    np.copyto(pixels.numpy().reshape(pixels_HWC.shape), pixels_HWC)
    return StagedImage(pixels, num_words)
