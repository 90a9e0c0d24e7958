"""Weight layouts of the kernels of `skinny_gemm.cuh`.

Shape legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda import skinny_gemm


def pack(weights_OI: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Reorder weights into blocks of 16 rows, stages of a chunk of inputs, and fragments.

    In a stage each warp has 64 inputs as four runs of 32 lanes of 8 values: rows 0-7 of the first
    32 inputs, rows 0-7 of the others, then the same of rows 8-15. Lane 4g + t holds the 8 inputs
    from 8t on, of row g. The kernel cuts the inputs into `parts`.
    """
    outputs, inputs = weights_OI.shape
    chunk = skinny_gemm.chunk(inputs // parts)
    shape = (outputs // 16, 2, 8, inputs // chunk, chunk // 64, 2, 4, 8)
    block, high, row, stage, warp, half, lane, value = range(8)
    order = (block, stage, warp, high, half, row, lane, value)
    return weights_OI.reshape(shape).permute(order).contiguous()


def pair_rotated(num_heads: int, device: torch.device) -> torch.Tensor:
    """The order of a query, key and value map's rows with rotated pairs 8 apart in a block.

    Of a head's 64 rows the first 32 are rotated, row i with row i + 16.
    """
    head = [*range(8), *range(16, 24), *range(8, 16), *range(24, 64)]
    order = torch.tensor(head, device=device)
    starts = torch.arange(3 * num_heads, device=device) * 64
    return (starts[:, None] + order).flatten()


def pack_beside(maps: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Pack maps with concatenated inputs."""
    return pack(torch.cat(list(maps), dim=1), parts)


def fold_norm(
    weights_OI: torch.Tensor, bias_O: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a map of normed inputs into weights of raw inputs and [O, 2] float32 corrections.

    With mean m and inverse deviation r of a token, W (g (x - m) r + b) + c equals r (Wg x - m
    sum(Wg)) + (W b + c). The corrections are sum(Wg), of the rounded weights, and W b + c. `norm`
    is (g, b).
    """
    scale_I, shift_I = (value.float() for value in norm)
    scaled_OI = (weights_OI.float() * scale_I).to(weights_OI.dtype)
    biases_O = weights_OI.float() @ shift_I + bias_O.float()
    return scaled_OI, torch.stack([scaled_OI.float().sum(1), biases_O], dim=1).contiguous()
