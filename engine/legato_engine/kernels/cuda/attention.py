"""Attention of a step's tokens to paged keys and values (bf16 or e4m3), as one kernel.

Consecutive tokens of one row form groups that read their keys and values once, and so do the query
heads of a key head. A token's bits are the same in any group and batch.

Shape legend as in `decoder`, but F stride of the output.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from legato_engine.kernels.cuda import capability, skinny_gemm
from legato_engine.kernels.cuda.capability import Feature
from legato_engine.kernels.cuda.module import Kernel, Module

HEAD_DIM = 64
"""Dimensions of a head in all decoders but text models'."""
HEAD_DIMS = (64, 128)
"""Those that the kernel is compiled for."""
GROUP = 8
"""Maximum tokens of a group."""
TILE = 16
"""Positions of a tensor core product; a page holds a multiple."""
MAX_CONTEXT = 32768
"""Maximum positions that have been tested."""
MAX_TOKENS = 32
"""Maximum tokens of a launch, each counted once for every query head of a key head.

A decoder's pass over its weights has as many.
"""
SPLITS = (1, 2, 4)
"""Numbers of thread blocks per head of a group that the kernel is compiled for."""

_LINES = 8
"""Lines of a head, whose warps a thread block has."""
_LINE_WARPS = {1: 2, 2: 1, 4: 1}
"""Warps of a line, by splits, where shared memory holds their rings."""
_MOST_STAGES = 3  # where they fill shared memory


@dataclasses.dataclass(frozen=True, slots=True)
class StepPositions:
    """Rows of `table_RM` and positions of B tokens, int64.

    `fresh_B` is the first position of the token's sequence that this step writes; beyond the
    token's own position it marks padding, whose output is zeros. `num_groups`, for which a launch
    is laid out, affects only its speed.
    """

    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    table_RM: torch.Tensor
    num_groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Constants of the kernel; `out_stride` is F, `kv_bytes` 2 (bf16) or 1 (e4m3).

    `num_heads` are of keys and values; each serves `share` successive heads of the queries.
    `in_stride` is from one token's queries to the next one's; 0: they have no others between.
    """

    num_heads: int
    page_size: int
    max_pages: int
    out_stride: int
    kv_bytes: int = 2
    share: int = 1
    in_stride: int = 0
    head_dim: int = HEAD_DIM


class AttentionForm(NamedTuple):
    """Compile-time form of the kernel, and the depth of its rings in steps per warp."""

    splits: int
    line_warps: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * self.line_warps * _LINES


class PagedAttention:
    """The kernel, compiled for each of `SPLITS`, or for one on GPUs without clusters."""

    def __init__(self, sizes: AttentionSizes, stages: int, split_stages: int) -> None:
        """`stages` is the ring's depth in steps per warp, `split_stages` that of a cluster."""
        self._sizes = sizes
        forms = attention_forms(stages, split_stages, sizes.head_dim)
        self._forms = {form.splits: form for form in forms}
        self._kernels = {splits: self._kernel(form) for splits, form in self._forms.items()}

    def launch(
        self,
        q_BD: torch.Tensor,
        k_NHSE: torch.Tensor,
        v_NHSE: torch.Tensor,
        positions: StepPositions,
        out_BF: torch.Tensor,
        scale_2: torch.Tensor | None = None,
    ) -> None:
        """Fill the first D columns of the outputs of at most `MAX_TOKENS // share` tokens.

        `positions` is read before the preceding kernel has ended. `scale_2`: float32 units of keys
        and of values in e4m3.
        """
        heads, share = self._sizes.num_heads, self._sizes.share
        batch = positions.row_B.shape[0] * share
        assert batch <= MAX_TOKENS, f"{batch} tokens"
        groups = min(batch, positions.num_groups * -(-share // GROUP))
        splits = splits_for(groups * heads)
        # The next kernel begins once all thread blocks run, so there are no more than needed.
        grid = heads * groups if splits > 1 else skinny_gemm.even_grid(heads * batch)
        form = self._forms[splits]
        self._kernels[splits].launch(
            (grid * splits, 1, 1),
            form.threads,
            (
                *(q_BD, k_NHSE, v_NHSE, scale_2),
                *(positions.row_B, positions.position_B, positions.fresh_B, positions.table_RM),
                *(out_BF, batch, form.stages),
            ),
            shared=self._shared(form, batch),
            cluster=splits,
            overlap=True,
        )

    def _kernel(self, form: AttentionForm) -> Kernel:
        defines = attend_defines(self._sizes, form.splits, form.line_warps)
        shared = self._shared(form, GROUP)
        return Module("paged_attention.cu", defines).kernel("attend", shared=shared)

    def _shared(self, form: AttentionForm, batch: int) -> int:
        head_dim = self._sizes.head_dim
        return shared_bytes(form.splits, form.stages, batch, form.line_warps, head_dim)


def attention_forms(
    stages: int, split_stages: int, head_dim: int = HEAD_DIM
) -> list[AttentionForm]:
    """Return the forms that fit the current GPU; none if shared memory holds no ring.

    Without clusters a head has one block; with little shared memory a line has one warp.
    """
    gpu = capability.current_gpu()
    whole = AttentionForm(1, _LINE_WARPS[1], stages)
    if shared_bytes(1, stages, GROUP, head_dim=head_dim) > gpu.shared:
        depths = range(_MOST_STAGES, 0, -1)
        fitting = (d for d in depths if shared_bytes(1, d, GROUP, 1, head_dim) <= gpu.shared)
        depth = next(fitting, 0)
        if depth == 0:
            return []
        whole = AttentionForm(1, 1, depth)
    if not gpu.has(Feature.CLUSTERS):
        return [whole]
    return [
        whole,
        *(AttentionForm(splits, _LINE_WARPS[splits], split_stages) for splits in SPLITS[1:]),
    ]


def splits_for(pairs: int) -> int:
    """Return the maximum splits for which all `pairs` fit the GPU at once; 1 without clusters."""
    if not capability.current_gpu().has(Feature.CLUSTERS):
        return 1
    return next((s for s in SPLITS[:0:-1] if pairs * s <= skinny_gemm.num_processors()), 1)


def shared_bytes(
    splits: int,
    stages: int,
    batch: int,
    line_warps: int | None = None,
    head_dim: int = HEAD_DIM,
) -> int:
    """Return the bytes of shared memory with rings of `stages` steps per warp.

    A step has keys and values (one tile of bf16, two of e4m3) and a barrier. Warps' results have
    memory of their own, twice; with splits they reuse the rings.
    """
    stage = 2 * TILE * head_dim * 2 + 8
    part = (head_dim + 4) * 4  # a token's softmax over some positions
    parts = 2 * min(batch, GROUP) * part if splits == 1 else 0
    return _LINES * (line_warps or _LINE_WARPS[splits]) * (stages * stage + parts)


def attend_defines(
    sizes: AttentionSizes, splits: int, line_warps: int | None = None
) -> dict[str, int]:
    return {
        "LINE_WARPS": line_warps or _LINE_WARPS[splits],
        "HEAD": sizes.head_dim,
        "DIM": sizes.in_stride or sizes.num_heads * sizes.share * sizes.head_dim,
        "MIXED": sizes.out_stride,
        "HEADS": sizes.num_heads,
        "PAGE": sizes.page_size,
        "PAGES": sizes.max_pages,
        "SPLITS": splits,
        "KV_BYTES": sizes.kv_bytes,
        "SHARE": sizes.share,
    }
