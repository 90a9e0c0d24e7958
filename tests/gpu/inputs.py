"""Marks, images and rows of GPU tests."""

from __future__ import annotations

import os

import pytest
import torch
from legato_engine.kernels.cuda.capability import PTX_SWITCH
from legato_engine.kernels.parameters import Quantised
from PIL import Image, ImageDraw

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or PTX_SWITCH in os.environ,
    reason="needs the kernels of compute capability 9.0",
)


# ---------------------------------------------------------------- image


def shapes_picture() -> Image.Image:
    """640x480: two red circles and a blue square on a light background."""
    image = Image.new("RGB", (640, 480), (225, 225, 215))
    pen = ImageDraw.Draw(image)
    pen.ellipse((60, 60, 180, 180), fill=(215, 35, 35))
    pen.ellipse((420, 280, 540, 400), fill=(215, 35, 35))
    pen.rectangle((400, 60, 500, 160), fill=(40, 80, 215))
    return image


# ---------------------------------------------------------------- quantised
# Rows for kernels, and how far their quantised ones may be from torch's.
#
# Shape legend: T rows, K values of a row.

CUDA = torch.device("cuda", 0)
DIMS = (16, 48, 320, 1152, 1280, 1296, 2048, 2304, 4304, 8192)
FLIPPED = 0.002  # of values: those that lie so near the middle of two that either is right


def rows(count: int, dim: int) -> torch.Tensor:
    """Rows of sizes from 1e-3 to 1e3, with a mean of half their size."""
    sizes_T1 = torch.logspace(-3, 3, count, device=CUDA)[:, None]
    return ((torch.randn(count, dim, device=CUDA) + 0.5) * sizes_T1).bfloat16()


def assert_same(ours: Quantised, expected: Quantised, flipped: float) -> None:
    """Scales agree; values too, but for at most a share that went to the neighbour."""
    torch.testing.assert_close(ours.scale, expected.scale, rtol=1e-5, atol=0)
    codes, others = ours.values.view(torch.uint8).int(), expected.values.view(torch.uint8).int()
    zeros = (codes & 0x7F) + (others & 0x7F) == 0  # 0 and -0
    steps = (codes - others).abs().masked_fill(zeros, 0)
    assert steps.max().item() <= 1
    assert (steps > 0).float().mean().item() <= flipped
