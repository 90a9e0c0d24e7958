"""Sizes of `stage_ring.cuh`, `skinny_gemm.cuh` and `block_map.cuh`: threads, shared memory."""

from __future__ import annotations

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
    """With all inputs of all tokens in shared memory, and their moments."""
    held = INPUT_BARRIERS + columns(batch) * (inputs + PAD) * 2
    beside = SUM_BARRIERS + block_sums(batch) + 8 * tiles_for(batch) * _MOMENT
    return ring(16 * chunk(inputs), stages) + held + beside


def parts_shared(inputs: int, parts: int, batch: int, stages: int, *, beside: bool = True) -> int:
    """With inputs that arrive in parts through a ring.

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
    """Of the blocks in progress."""
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
