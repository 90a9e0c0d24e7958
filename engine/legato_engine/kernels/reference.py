"""The operations of `ops` in plain torch: their definition; shape legend as there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from legato_engine.kernels import pages
from legato_engine.kernels.layer_cache import LayerCache

_SCRATCH_PAGE = 0
_NO_SLOT = 0
_ROW_BLOCK = 8


def linear_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Pad rows to whole blocks, because CPU libraries round the remainder differently."""
    rows_TD = x.reshape(-1, x.shape[-1])
    out = F.linear(whole_blocks(rows_TD), weight, bias)[: rows_TD.shape[0]]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def whole_blocks(rows_TD: torch.Tensor) -> torch.Tensor:
    padding = -rows_TD.shape[0] % _ROW_BLOCK
    return F.pad(rows_TD, (0, 0, 0, padding)) if padding else rows_TD


def add_low_rank_rows(
    out_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SRI: torch.Tensor,
    b_SRO: torch.Tensor,
    slot_T: torch.Tensor,
    rank_S: torch.Tensor,
) -> torch.Tensor:
    slots, ranks = slot_T.tolist(), rank_S.tolist()
    if len(slots) == 1:
        slots *= x_TI.shape[0]
    for slot in sorted({*slots} - {_NO_SLOT}):
        rows = [row for row, each in enumerate(slots) if each == slot]
        a_RI, b_RO = a_SRI[slot, : ranks[slot]], b_SRO[slot, : ranks[slot]]
        out_TO[rows] += linear_rows(linear_rows(x_TI[rows], a_RI, None), b_RO.t(), None)
    return out_TO


def add_low_rank_gathered(
    out_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SRI: torch.Tensor,
    b_SRO: torch.Tensor,
    slot_T: torch.Tensor,
    rank: int,
) -> torch.Tensor:
    a_TRI = a_SRI[:, :rank].index_select(0, slot_T)
    b_TRO = b_SRO[:, :rank].index_select(0, slot_T)
    if slot_T.shape[0] == 1:
        return torch.addmm(out_TO, x_TI @ a_TRI[0].t(), b_TRO[0])
    hidden_T1R = torch.bmm(x_TI[:, None], a_TRI.transpose(1, 2))
    return torch.baddbmm(out_TO[:, None], hidden_T1R, b_TRO)[:, 0]


def rotate(x_THE: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by the pairs (i, i + R/2) of their first R dims.

    Tables are float32 [T, 1, R/2]; the result is rounded once.
    """
    half = cos_T1R.shape[-1]
    first, second = x_THE[..., :half], x_THE[..., half : 2 * half]
    parts = [
        (first * cos_T1R - second * sin_T1R).to(x_THE.dtype),
        (first * sin_T1R + second * cos_T1R).to(x_THE.dtype),
    ]
    if 2 * half < x_THE.shape[-1]:
        parts.append(x_THE[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def full_attention(
    q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHE: torch.Tensor
) -> torch.Tensor:
    k_BTHE, v_BTHE = (_spread(x, q_BTHE.shape[2]) for x in (k_BTHE, v_BTHE))
    q_BHTE, k_BHTE, v_BHTE = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE))
    return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE).transpose(1, 2)


def suffix_attention(q_THE: torch.Tensor, k_LHE: torch.Tensor, v_LHE: torch.Tensor) -> torch.Tensor:
    """A whole sequence needs no mask in memory."""
    num_queries, length = q_THE.shape[0], k_LHE.shape[0]
    k_LHE, v_LHE = (_spread(x, q_THE.shape[1]) for x in (k_LHE, v_LHE))
    if num_queries == length:
        q_1HTE, k_1HLE, v_1HLE = (x.transpose(0, 1)[None] for x in (q_THE, k_LHE, v_LHE))
        out_1HTE = F.scaled_dot_product_attention(q_1HTE, k_1HLE, v_1HLE, is_causal=True)
        return out_1HTE[0].transpose(0, 1)
    visible_TL = torch.ones(num_queries, length, dtype=torch.bool, device=q_THE.device)
    visible_TL = visible_TL.tril(length - num_queries)
    return _attention(q_THE[None], k_LHE[None], v_LHE[None], visible_TL[None])[0]


def masked_attention(
    q_THE: torch.Tensor, k_LHE: torch.Tensor, v_LHE: torch.Tensor, visible_TL: torch.Tensor
) -> torch.Tensor:
    k_LHE, v_LHE = (_spread(x, q_THE.shape[1]) for x in (k_LHE, v_LHE))
    return _attention(q_THE[None], k_LHE[None], v_LHE[None], visible_TL[None])[0]


def suffix_attention_rows(
    q_THE: torch.Tensor, k_LHE: torch.Tensor, v_LHE: torch.Tensor
) -> torch.Tensor:
    k_HLE, v_HLE = k_LHE.transpose(0, 1), v_LHE.transpose(0, 1)
    out_THE = torch.empty_like(q_THE)
    before = k_LHE.shape[0] - q_THE.shape[0]
    for row, q_HE in enumerate(q_THE):
        length = before + row + 1
        out_THE[row] = _single_attention(q_HE, k_HLE[:, :length], v_HLE[:, :length])
    return out_THE


class Context(NamedTuple):
    """Consecutive rows of a step that are tokens of one sequence."""

    pages_M: torch.Tensor
    """Of the longest row."""
    first: int
    lengths: Sequence[int]
    """Positions that each row sees."""


def contexts(
    positions_B: torch.Tensor, page_table_BM: torch.Tensor, page_size: int
) -> Sequence[Context]:
    """Read a step's rows on the host; padding rows have none."""
    lengths, tables = (positions_B + 1).tolist(), page_table_BM.tolist()
    found = []
    for table, rows in groupby(range(len(tables)), key=tables.__getitem__):
        if table[0] == _SCRATCH_PAGE:
            continue
        first, *others = rows
        own = lengths[first : first + 1 + len(others)]
        found.append(Context(page_table_BM[first, : -(-max(own) // page_size)], first, own))
    return found


def decode_attention_rows(
    q_BHE: torch.Tensor, cache: LayerCache, contexts: Sequence[Context]
) -> torch.Tensor:
    """A sequence's context is gathered once for all of its rows."""
    out_BHE = torch.zeros_like(q_BHE)
    for pages_M, first, lengths in contexts:
        k_HLE, v_HLE = pages.gather_heads(cache, pages_M, q_BHE.dtype)
        for row, length in enumerate(lengths, first):
            seen_HE = _single_attention(q_BHE[row], k_HLE[:, :length], v_HLE[:, :length])
            if len(q_BHE) == 1:
                return seen_HE[None]
            out_BHE[row] = seen_HE
    return out_BHE


def decode_attention_padded(
    q_BHE: torch.Tensor,
    cache: LayerCache,
    positions_B: torch.Tensor,
    page_table_BM: torch.Tensor,
) -> torch.Tensor:
    """Over all pages of the table, masked, without a host read.

    Positions after a row's own are zeroed, because they may hold NaN.
    """
    num_kv_heads, page_size = cache.k_NHSE.shape[1:3]
    context = page_table_BM.shape[1] * page_size
    visible_BL = torch.arange(context, device=q_BHE.device) <= positions_B[:, None]
    hidden_BL11 = ~visible_BL[:, :, None, None]
    k_BLHE, v_BLHE = (
        pages.all_pages(cache_NHSE, page_table_BM, scale, q_BHE.dtype).masked_fill(hidden_BL11, 0.0)
        for cache_NHSE, scale in zip(cache[:2], pages.units(cache.scale_2), strict=True)
    )
    # Queries that share a key head are treated as several tokens.
    num_rows, head_dim = q_BHE.shape[0], q_BHE.shape[-1]
    q_BGHE = q_BHE.reshape(num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
    out_BGHE = _attention(q_BGHE, k_BLHE, v_BLHE, visible_BL[:, None])
    return out_BGHE.transpose(1, 2).flatten(1, 2)


def _spread(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    group = num_heads // x.shape[-2]
    return x if group == 1 else x.repeat_interleave(group, dim=-2)


def _single_attention(q_HE: torch.Tensor, k_HLE: torch.Tensor, v_HLE: torch.Tensor) -> torch.Tensor:
    """G of the token's heads share a key head."""
    q_1HGE = q_HE.reshape(1, k_HLE.shape[0], -1, q_HE.shape[-1])
    return F.scaled_dot_product_attention(q_1HGE, k_HLE[None], v_HLE[None])[0].flatten(0, 1)


def _attention(
    q_BTHE: torch.Tensor, k_BLHE: torch.Tensor, v_BLHE: torch.Tensor, visible_BTL: torch.Tensor
) -> torch.Tensor:
    q_BHTE, k_BHLE, v_BHLE = (x.transpose(1, 2) for x in (q_BTHE, k_BLHE, v_BLHE))
    mask_B1TL = visible_BTL[:, None]
    out_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHLE, v_BHLE, attn_mask=mask_B1TL)
    return out_BHTE.transpose(1, 2)
