"""Attention of a step's tokens to paged keys and values, as one kernel.

Successive tokens of one row form groups that read their keys and values once. A token's result has
the same bits alone, in any group and in any batch.

Keys and values are bf16, or e4m3 in units of scales.

Shape legend: B tokens, H heads, E head dim (64), D = H * E, F stride of the output, R rows of the
page table, M pages per row, N pages, S positions per page.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.module import Kernel, Module

HEAD_DIM = 64
GROUP = 8
"""The most tokens of a group."""
TILE = 16
"""Positions of a product; a page holds a multiple."""
MAX_CONTEXT = 32768
"""Positions at most, of those that were tried."""
SPLITS = (1, 2, 4)
"""Thread blocks per head of a group that the kernel is compiled for."""

_WARPS = {1: 16, 2: 8, 4: 8}
"""Warps of a thread block, by splits."""
_STAGE = 2 * TILE * HEAD_DIM * 2 + 8
"""Keys and values of a step, which are a tile of bf16 or two of e4m3, and a barrier."""

_PART = (HEAD_DIM + 4) * 4  # what a token's softmax over some positions leaves


@dataclasses.dataclass(frozen=True, slots=True)
class StepPositions:
    """Where B tokens stand, int64: their rows of `table_RM`, their positions, and `fresh_B`: the
    first position of each token's sequence that this very step writes. What writes only behind its
    own position is padding: its output is zeros.

    `num_groups` is how many groups a launch is laid out for; only its speed depends on that.
    """

    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    table_RM: torch.Tensor
    num_groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What the kernel is compiled for; `out_stride` is F.

    `kv_bytes` of a key's or value's element: 2 (bf16) or 1 (e4m3).
    """

    num_heads: int
    page_size: int
    max_pages: int
    out_stride: int
    kv_bytes: int = 2


class Attention:
    """The kernel, for each number of thread blocks that may share a head of a group."""

    def __init__(self, sizes: AttentionSizes, stages: int, split_stages: int) -> None:
        """Rings of so many steps per warp, `split_stages` where a cluster shares a head."""
        self._sizes = sizes
        self._stages = {splits: stages if splits == 1 else split_stages for splits in SPLITS}
        self._kernels = {splits: self._kernel(splits) for splits in SPLITS}

    def launch(
        self,
        q_BD: torch.Tensor,
        k_NHSE: torch.Tensor,
        v_NHSE: torch.Tensor,
        positions: StepPositions,
        out_BF: torch.Tensor,
        scale_2: torch.Tensor | None = None,
    ) -> None:
        """Fill the first D columns of the tokens' outputs.

        At most 32 tokens. `positions` is read before the preceding kernel has ended.
        `scale_2` (float32): the units of keys and of values of e4m3.
        """
        batch, heads = positions.row_B.shape[0], self._sizes.num_heads
        groups = min(batch, positions.num_groups)
        splits = splits_for(groups * heads)
        # The kernel behind this one begins when all thread blocks have: none is to spare.
        grid = heads * groups if splits > 1 else skinny_gemm.even_grid(heads * batch)
        stages = self._stages[splits]
        self._kernels[splits].launch(
            (grid * splits, 1, 1),
            32 * _WARPS[splits],
            (
                *(q_BD, k_NHSE, v_NHSE, scale_2),
                *(positions.row_B, positions.position_B, positions.fresh_B, positions.table_RM),
                *(out_BF, batch, stages),
            ),
            shared=shared_bytes(splits, stages, batch),
            cluster=splits,
            overlap=True,
        )

    def _kernel(self, splits: int) -> Kernel:
        module = Module("paged_attention.cu", attend_defines(self._sizes, splits))
        return module.kernel("attend", shared=shared_bytes(splits, self._stages[splits], GROUP))


def splits_for(pairs: int) -> int:
    """Thread blocks per head of a group, of so many in all: as many as find room at once."""
    return next((s for s in SPLITS[:0:-1] if pairs * s <= skinny_gemm.num_processors()), 1)


def shared_bytes(splits: int, stages: int, batch: int) -> int:
    """Dynamic shared memory of a launch with rings of `stages` steps per warp.

    What the warps compute lies beside the rings, twice; with splits it lies in them.
    """
    parts = 2 * min(batch, GROUP) * _PART if splits == 1 else 0
    return _WARPS[splits] * (stages * _STAGE + parts)


def attend_defines(sizes: AttentionSizes, splits: int) -> dict[str, int]:
    """Constants of `paged_attention.cu` where `splits` thread blocks share a head of a group."""
    return {
        "DIM": sizes.num_heads * HEAD_DIM,
        "MIXED": sizes.out_stride,
        "HEADS": sizes.num_heads,
        "PAGE": sizes.page_size,
        "PAGES": sizes.max_pages,
        "SPLITS": splits,
        "KV_BYTES": sizes.kv_bytes,
    }
