"""Rows for kernels, and how far their quantised ones may be from torch's.

Shape legend: T rows, K values of a row.
"""

from __future__ import annotations

import torch
from legato_engine.kernels.parameters import Quantised

CUDA = torch.device("cuda", 0)
DIMS = (16, 48, 320, 1152, 1280, 1296, 2304, 4304, 8192)
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
