"""A text decoder's operations between products, for a step's or a prompt's tokens.

Shape legend as in `kernels.ops`, but G heads of queries, keys and values, F inner width.
"""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels.cuda.attention import (
    HEAD_DIMS,
    MAX_CONTEXT,
    MAX_TOKENS,
    TILE,
    AttentionSizes,
    PagedAttention,
    StepPositions,
    attention_forms,
)
from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.cuda.module import Kernel, Module, made_on
from legato_engine.kernels.cuda.prefill import is_plain
from legato_engine.kernels.pages import LayerCache

SOURCE = "token_rows.cu"

_THREADS = 256
_VALUES_PER_LOAD = 8
_MAX_ROWS = 65535  # of a grid
_STAGES = 2  # steps of a warp's ring


Norms = tuple[nn.RMSNorm, nn.RMSNorm]
"""Of each head of queries, and of keys."""


def defines(
    num_heads: int, num_kv: int, head_dim: int, half: int, page: int, *, normed: bool = False
) -> dict[str, int]:
    """`half` is the number of rotated pairs of a head."""
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv,
        "HEAD": head_dim,
        "HALF": half,
        "PAGE": page,
        "NORMED": int(normed),
    }


def can_rotate(qkv_TGE: torch.Tensor, cos_T1R: torch.Tensor, k_NHSE: torch.Tensor) -> bool:
    """Return whether `rotate_and_cache` supports these tensors; values must be like keys."""
    return (
        is_plain(qkv_TGE)
        and is_plain(k_NHSE)
        and qkv_TGE.shape[-1] % _VALUES_PER_LOAD == 0
        and cos_T1R.shape[-1] % _VALUES_PER_LOAD == 0
        and cos_T1R.dtype is torch.float32
        and cos_T1R.is_contiguous()
    )


def can_norm(norms: Norms, half: int) -> bool:
    """Return whether `rotate_and_cache` applies these norms, for which threads share a head."""
    first, second = norms
    threads = half // _VALUES_PER_LOAD
    return (
        first.weight.shape == second.weight.shape == (2 * half,)
        and is_plain(first.weight)
        and is_plain(second.weight)
        and first.eps is not None
        and first.eps == second.eps
        and threads <= 32
        and threads.bit_count() == 1
    )


def rotate_and_cache(
    qkv_TGE: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    k_NHSE: torch.Tensor,
    v_NHSE: torch.Tensor,
    norms: Norms | None = None,
) -> None:
    """Rotate queries and keys in place by cosines and sines [T, 1, R/2]; write keys and values.

    `places`: the tokens' pages and slots, int64. The bits are those of `reference.rotate`, of what
    `norms` leave.
    """
    num_kv, page_size = k_NHSE.shape[1:3]
    num_heads = qkv_TGE.shape[1] - 2 * num_kv
    sizes = num_heads, num_kv, qkv_TGE.shape[2], angles[0].shape[-1], page_size
    kernel = made_on(qkv_TGE.device, _rotation, *sizes, norms is not None)
    of_norms: tuple[torch.Tensor | float | None, ...] = (None, None, 0.0)
    if norms is not None:
        of_norms = norms[0].weight, norms[1].weight, norms[0].eps
    operands = (qkv_TGE, *angles, *places, k_NHSE, v_NHSE, *of_norms)
    kernel.launch((len(qkv_TGE), 1, 1), _THREADS, operands, overlap=True)


def can_add_product(to_TO: torch.Tensor, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Return whether a library adds a product to `to` without copies."""
    plain = is_plain(to_TO) and is_plain(x_TI) and is_plain(weight_OI)
    return plain and to_TO.dim() == x_TI.dim() == weight_OI.dim()


def can_gate(both_T2F: torch.Tensor) -> bool:
    return (
        is_plain(both_T2F)
        and both_T2F.dim() == 2
        and len(both_T2F) <= _MAX_ROWS
        and both_T2F.shape[-1] % (2 * _VALUES_PER_LOAD) == 0
    )


def gate(both_T2F: torch.Tensor) -> torch.Tensor:
    """Silu of the first half times the second, [T, F], rounded once."""
    rows, width = both_T2F.shape
    out_TF = both_T2F.new_empty(rows, width // 2)
    loads = width // 2 // _VALUES_PER_LOAD
    grid = (-(-loads // _THREADS), rows, 1)
    kernel = made_on(both_T2F.device, _gate)
    kernel.launch(grid, _THREADS, (both_T2F, out_TF, loads), overlap=True)
    return out_TF


def can_read(page_table_BM: torch.Tensor, cache: LayerCache) -> bool:
    k_NHSE = cache.k_NHSE
    page_size, head_dim = k_NHSE.shape[2:]
    return (
        is_plain(k_NHSE)
        and head_dim in HEAD_DIMS
        and page_size % TILE == 0
        and page_table_BM.shape[1] * page_size <= MAX_CONTEXT
        and runs(Kernels.STEPS, k_NHSE.device)
        and bool(attention_forms(_STAGES, _STAGES, head_dim))
    )


def can_attend(page_table_BM: torch.Tensor, cache: LayerCache, q_BHE: torch.Tensor) -> bool:
    return (
        is_plain(q_BHE[0])
        and q_BHE.stride(0) % _VALUES_PER_LOAD == 0
        and q_BHE.shape[1] // cache.k_NHSE.shape[1] <= MAX_TOKENS
        and can_read(page_table_BM, cache)
    )


class RowAttention:
    """Attention of one token per row, as the kernel takes it; of all layers of a step.

    Can be captured.
    """

    def __init__(self, positions_B: torch.Tensor, page_table_BM: torch.Tensor) -> None:
        row_B = torch.arange(len(positions_B), device=positions_B.device)
        # A row on the scratch page is padding. Others may read what the step before wrote as late
        # as what this one writes.
        fresh_B = torch.where(page_table_BM[:, 0] == 0, positions_B + 1, 0)
        self._positions = row_B, positions_B, fresh_B
        self._table_BM = page_table_BM.contiguous()

    def __call__(self, q_BHE: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        num_kv, page_size, head_dim = cache.k_NHSE.shape[1:]
        num_heads, share = q_BHE.shape[1], q_BHE.shape[1] // num_kv
        sizes = AttentionSizes(
            num_heads=num_kv,
            page_size=page_size,
            max_pages=self._table_BM.shape[1],
            out_stride=num_heads * head_dim,
            share=share,
            in_stride=q_BHE.stride(0),
            head_dim=head_dim,
        )
        kernel = made_on(q_BHE.device, PagedAttention, sizes, _STAGES, _STAGES)
        out_BHE = q_BHE.new_empty(q_BHE.shape)
        most = MAX_TOKENS // share
        for first in range(0, len(q_BHE), most):
            part = slice(first, first + most)
            row_B, position_B, fresh_B = (each[part] for each in self._positions)
            positions = StepPositions(row_B, position_B, fresh_B, self._table_BM, len(row_B))
            kernel.launch(q_BHE[part], cache.k_NHSE, cache.v_NHSE, positions, out_BHE[part])
        return out_BHE


def _rotation(
    num_heads: int, num_kv: int, head_dim: int, half: int, page: int, normed: bool
) -> Kernel:
    constants = defines(num_heads, num_kv, head_dim, half, page, normed=normed)
    return Module(SOURCE, constants).kernel("rotate_and_cache")


def _gate() -> Kernel:
    return Module(SOURCE, {}).kernel("gate")
