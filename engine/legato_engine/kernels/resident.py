"""The resident kernel, as far as a model can have it on its device."""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda import resident_limits
from legato_engine.kernels.cuda.resident import model_sizes
from legato_engine.kernels.cuda.resident_decoder import ResidentDecoder, builds_for
from legato_engine.kernels.cuda.resident_subject import subject
from legato_engine.kernels.cuda.resident_values import values_obstacle
from legato_engine.kernels.step import DecoderSizes

__all__ = [
    "ResidentDecoder",
    "builds_for",
    "model_sizes",
    "obstacle",
    "subject",
    "values_obstacle",
]


def obstacle(
    sizes: DecoderSizes, num_layers: int, embedding: torch.Tensor, *, plain: bool
) -> str | None:
    """The first limit of the kernel that a model exceeds on its device, in words, or None.

    `plain`: every layer is a dense MLP beside attention, without gains.
    """
    device, dtype = embedding.device, embedding.dtype
    return resident_limits.obstacle(
        resident_limits.wish(sizes, num_layers, device, dtype, plain=plain)
    )
