"""Sizes and weight packing of the skinny GEMM kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

WARPS = 8
WORKERS = 32 * WARPS
THREADS = WORKERS + 64
"""The workers, and a warp each that reads weights and inputs."""
FINISHERS = 4
"""Warps that finish what the workers multiplied, in kernels that hold all inputs."""
FINISHING = WORKERS + 32 * (1 + FINISHERS)
"""Threads of such a kernel, with a warp that reads weights."""
TILES = (1, 2, 3, 4)
"""Groups of 8 tokens that kernels are compiled for."""

INPUT_STAGES = {1: 4, 2: 4, 3: 3, 4: 2}
"""Stages of the ring of inputs, by tiles."""

GROUP = 64
"""Inputs of a stage that one warp takes."""
PAD = 32
"""Padding elements after each token's inputs."""

CLUSTER = 2
"""Thread blocks of a cluster; clusters of four would not all fit an H200 at once."""

SUM = 512
"""Bytes of a block's sums over one tile."""
SUM_BARRIERS = 128
"""Bytes of the barriers between the workers and the finishers."""
INPUT_BARRIERS = 128
"""Bytes of those that chunks of inputs arrive at, in kernels that hold all inputs."""

_MOMENT = 8
_SHARED_FROM = 3  # tokens, from which sharing inputs pays off
_PARTS = 4
_LONG = 4096  # inputs from which cutting pays off


def tiles_for(batch: int) -> int:
    return next(tiles for tiles in TILES if batch <= 8 * tiles)


def chunk(inputs: int) -> int:
    """Inputs of one stage: a group for each warp, or the most that divide `inputs`."""
    return next(g * GROUP for g in range(WARPS, 0, -1) if inputs % (g * GROUP) == 0)


def num_parts(inputs: int, outputs: int) -> int:
    divides = inputs % (_PARTS * GROUP) == 0 and outputs % (_PARTS * 16) == 0
    return _PARTS if divides and inputs >= _LONG else 1


def cluster(batch: int) -> int:
    return CLUSTER if batch >= _SHARED_FROM else 1


def whole_shared(inputs: int, batch: int, stages: int) -> int:
    """Return the bytes of shared memory for all tokens' inputs and their moments."""
    held = INPUT_BARRIERS + columns(batch) * (inputs + PAD) * 2
    beside = SUM_BARRIERS + block_sums(batch) + 8 * tiles_for(batch) * _MOMENT
    return ring(16 * chunk(inputs), stages) + held + beside


def parts_shared(inputs: int, parts: int, batch: int, stages: int, *, beside: bool = True) -> int:
    """Return the bytes of shared memory for inputs that stream through a ring.

    The warps' sums reuse the memory of the weights; the thread block's are `beside` it, or
    elsewhere.
    """
    tiles = tiles_for(batch)
    width = chunk(inputs // parts)
    assert stages * 32 * width >= WARPS * parts * tiles * SUM, f"{stages} stages hold no sums"
    rings = ring(16 * width, stages)
    rings += ring(columns(batch) * (width + PAD), INPUT_STAGES[tiles])
    return rings + (parts * tiles * SUM if beside else 0)


def block_sums(batch: int, blocks: int = 2) -> int:
    """Return the bytes of the partial sums of blocks in progress."""
    return blocks * WARPS * tiles_for(batch) * SUM


def columns(batch: int) -> int:
    tiles = tiles_for(batch)
    return batch if tiles == 1 else 8 * tiles


def ring(elements: int, stages: int) -> int:
    return _barriers(stages) + stages * elements * 2


def num_processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def even_grid(blocks: int, multiple: int = 1) -> int:
    """One wave, with as even shares as possible."""
    each = -(-blocks // num_processors())
    return -(-blocks // each // multiple) * multiple


def _barriers(stages: int) -> int:
    return -(-stages // 8) * 128


# ---------------------------------------------------------------- packing

# Weight layouts of the kernels of `skinny_gemm.cuh`.
#
# Shape legend: O outputs, I inputs.


def pack(weights_OI: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Reorder weights into blocks of 16 rows, stages of a chunk of inputs, and fragments.

    In a stage each warp has 64 inputs as four runs of 32 lanes of 8 values: rows 0-7 of the first
    32 inputs, rows 0-7 of the others, then the same of rows 8-15. Lane 4g + t holds the 8 inputs
    from 8t on, of row g. The kernel cuts the inputs into `parts`.
    """
    outputs, inputs = weights_OI.shape
    width = chunk(inputs // parts)
    shape = (outputs // 16, 2, 8, inputs // width, width // 64, 2, 4, 8)
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
