"""Linear maps, and attention on paged keys and values: one signature each, whoever implements it.

Shape legend: N pages, S positions per page, H heads, E head dim, T query tokens of one sequence,
L its positions, B rows, M pages per row. Caches are one layer's, [N, S, H, E].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato_engine.kernels import reference


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[..., out] of [..., in] by a weight [out, in].

    On the CPU the bits of a row depend on nothing but that row: not on its neighbours, its place
    or how many rows there are.
    """
    if x.device.type == "cpu":
        return reference.linear_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def write_kv(
    cache_NSHE: torch.Tensor, new_THE: torch.Tensor, page_T: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """Put each of T keys or values at its (page, slot), both int64."""
    reference.write_kv(cache_NSHE, new_THE, page_T, slot_T)


def gather_pages(cache_NSHE: torch.Tensor, pages_M: torch.Tensor, length: int) -> torch.Tensor:
    """[length, H, E]: the first `length` positions of the pages, copied."""
    return reference.gather_pages(cache_NSHE, pages_M, length)


def full_attention(
    q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor
) -> torch.Tensor:
    """[B, T, H, E]: every token of a row sees every token of that row."""
    return reference.full_attention(q_BTHE, k_BTHE, v_BTHE)


def suffix_attention(q_THE: torch.Tensor, k_LHE: torch.Tensor, v_LHE: torch.Tensor) -> torch.Tensor:
    """[T, H, E]: the last T of L positions, each seeing itself and all before it."""
    return reference.suffix_attention(q_THE, k_LHE, v_LHE)


def decode_attention(
    q_BHE: torch.Tensor,
    k_NSHE: torch.Tensor,
    v_NSHE: torch.Tensor,
    positions_B: torch.Tensor,
    page_table_BM: torch.Tensor,
) -> torch.Tensor:
    """[B, H, E]: one token per row, seeing positions 0..positions_B[b] of its pages.

    A row whose first page is 0 is padding and gives zeros on the CPU, anything finite elsewhere.
    On the CPU a row's bits depend on nothing but that row; elsewhere nothing is read on the host,
    so the call can be captured.
    """
    if q_BHE.device.type == "cpu":
        return reference.decode_attention_rows(q_BHE, k_NSHE, v_NSHE, positions_B, page_table_BM)
    return reference.decode_attention_padded(q_BHE, k_NSHE, v_NSHE, positions_B, page_table_BM)
