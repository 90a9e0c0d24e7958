"""Reference implementations of `ops` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import activations, pages
from legato_engine.kernels.pages import LayerCache
from legato_engine.kernels.parameters import (
    E4M3,
    AdapterRows,
    ExpertAdapters,
    ExpertMap,
    ExpertWeights,
    Quantised,
    Routes,
)

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
        return out_TO.addmm_(x_TI @ a_TRI[0].t(), b_TRO[0])
    hidden_T1R = torch.bmm(x_TI[:, None], a_TRI.transpose(1, 2))
    out_TO[:, None].baddbmm_(hidden_T1R, b_TRO)
    return out_TO


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
    """Attend to a prefix and the tokens themselves; a whole sequence needs no mask in memory."""
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
    """Attention [T, H, E] to visible positions. Can be captured on a GPU."""
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
    """Attend to paged contexts, gathering each sequence's once for all of its rows."""
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


# ---------------------------------------------------------------- reference rows

# The operations of `row_ops` with torch; shape legend as there.

_LARGEST = 448.0
_FLOOR = 1e-12


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if y is None else x + y
    normed: torch.Tensor = norm(x)
    return x, normed


def add_norm_quantised(
    x: torch.Tensor, y: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, Quantised]:
    x = x if y is None else x + y
    weight, bias = norm.weight.float(), norm.bias.float()
    normed = F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)
    return x, quantise(normed)


def quantise(x: torch.Tensor) -> Quantised:
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True).clamp_min(_FLOOR)
    values = (x * (amax.reciprocal() * _LARGEST)).clamp(-_LARGEST, _LARGEST)
    return Quantised(values.to(E4M3), amax * (1.0 / _LARGEST))


def quantise_gelu(x: torch.Tensor, centre_K: torch.Tensor) -> Quantised:
    return quantise(activations.gelu(x.float()) - centre_K.float())


# ---------------------------------------------------------------- reference experts


def experts_sorted(
    x_TD: torch.Tensor,
    routes: Routes,
    up: ExpertWeights,
    down: ExpertWeights,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """One product per expert with tokens, whose counts are read on the host.

    Terms are added in the order of shares.
    """
    expert_J = routes.expert_TK.flatten()
    order_J = expert_J.argsort(stable=True)
    out_JD = x_TD.new_empty(len(expert_J), x_TD.shape[-1])
    counts = torch.bincount(expert_J, minlength=len(up.weight_XOI)).tolist()
    for expert, pairs in enumerate(torch.split(order_J, counts)):
        if len(pairs):
            tokens, count = pairs // routes.expert_TK.shape[1], len(pairs)
            rows_TD = whole_blocks(x_TD[tokens])
            both_TO = _one_expert(rows_TD, up, expert)
            if adapters is not None:
                own = expert, adapters.rows, tokens
                _change_rows(both_TO[:count], rows_TD[:count], adapters.up, *own)
            inner_TI = gate(both_TO)
            out_JD[pairs] = _one_expert(inner_TI, down, expert)[:count]
            if adapters is not None:
                own_TD = out_JD[pairs]
                _change_rows(own_TD, inner_TI[:count], adapters.down, *own)
                out_JD[pairs] = own_TD
    return _shared_out(out_JD.view(*routes.expert_TK.shape, -1), routes)


def experts_gathered(
    x_TD: torch.Tensor,
    routes: Routes,
    up: ExpertWeights,
    down: ExpertWeights,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Apply experts to few tokens, gathering each token's weights."""
    out_TKD = []
    for expert_T in routes.expert_TK.unbind(1):
        both_TO = _own_expert(x_TD, up, expert_T)
        if adapters is not None:
            slot_T = adapters.rows.slot_T.expand(len(x_TD))
            own = slot_T, expert_T, adapters.rows.rank
            both_TO = both_TO + own_low_rank(x_TD, adapters.up, *own)
        inner_TI = gate(both_TO)
        out_TD = _own_expert(inner_TI, down, expert_T)
        if adapters is not None:
            out_TD = out_TD + own_low_rank(inner_TI, adapters.down, *own)
        out_TKD.append(out_TD)
    return _shared_out(torch.stack(out_TKD, dim=1), routes)


def own_low_rank(
    x_JI: torch.Tensor, change: ExpertMap, slot_J: torch.Tensor, expert_J: torch.Tensor, rank: int
) -> torch.Tensor:
    """B(A x) of each row's slot and expert, with a copy of both."""
    index_J = slot_J * change.a_SXRI.shape[1] + expert_J
    a_JRI, b_JRO = (each.flatten(0, 1)[:, :rank].index_select(0, index_J) for each in change)
    return torch.bmm(torch.bmm(x_JI[:, None], a_JRI.transpose(1, 2)), b_JRO)[:, 0]


def gate(z: torch.Tensor) -> torch.Tensor:
    """Apply the gate in float32 and round once."""
    u, g = z.float().chunk(2, dim=-1)
    return (activations.gelu(u, "none") * (g + 1.0)).to(z.dtype)


def _change_rows(
    out_TO: torch.Tensor,
    x_TI: torch.Tensor,
    change: ExpertMap,
    expert: int,
    rows: AdapterRows,
    tokens: torch.Tensor,
) -> None:
    slot_T = rows.slot_T if len(rows.slot_T) == 1 else rows.slot_T[tokens]
    a_SRI, b_SRO = change.a_SXRI[:, expert], change.b_SXRO[:, expert]
    add_low_rank_rows(out_TO, x_TI, a_SRI, b_SRO, slot_T, rows.rank_S)


def _one_expert(x_TI: torch.Tensor, layer: ExpertWeights, expert: int) -> torch.Tensor:
    out_TO = F.linear(x_TI, layer.one(x_TI.dtype, expert))
    return out_TO if layer.scale_XO is None else _scaled(out_TO, layer.scale_XO[expert])


def _own_expert(x_TI: torch.Tensor, layer: ExpertWeights, expert_T: torch.Tensor) -> torch.Tensor:
    if layer.packed is None:
        weight_TOI = pages.taken(layer.weight_XOI, expert_T).to(x_TI.dtype)
    else:
        weight_TOI = layer.packed.dense(x_TI.dtype)[expert_T]
    out_TO = torch.bmm(weight_TOI, x_TI[:, :, None])[:, :, 0]
    return out_TO if layer.scale_XO is None else _scaled(out_TO, layer.scale_XO[expert_T])


def _scaled(out: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (out.float() * scale).to(out.dtype)


def _shared_out(out_TKD: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Sum the shared experts in float32, in order, and round once."""
    share_TK1 = routes.share_TK.float()[:, :, None]
    terms = (share_TK1 * out_TKD.float()).unbind(1)
    total_TD = terms[0]
    for term_TD in terms[1:]:
        total_TD = total_TD + term_TD
    return total_TD.to(out_TKD.dtype)


# ---------------------------------------------------------------- reference certainty

# A model's confidence in a token with a value: the specification of
# `cuda/sources/value_argmax.cu`.
#
# Rows do not interact. Shape legend: B tokens, V vocabulary, N bins.


def existence(logits_BV: torch.Tensor, token_B: torch.Tensor, end_token: int) -> torch.Tensor:
    """[B] float32: the token's probability against that of ending, among these two.

    Logits are constrained; the vectorised and the scalar exponential of a CPU differ in the last
    bit, which rounding from float64 hides.
    """
    chosen_B = logits_BV.gather(-1, token_B[:, None])[:, 0].double()
    return torch.sigmoid(chosen_B - logits_BV[:, end_token].double()).float()


def concentration(logits_BN: torch.Tensor, bin_B: torch.Tensor, reach: int) -> torch.Tensor:
    """[B] float32: the probability of the bins at most `reach` from one of them."""
    probability_BN = logits_BN.double().softmax(-1)
    bin_N = torch.arange(logits_BN.shape[-1], device=logits_BN.device)
    near_BN = (bin_N - bin_B[..., None]).abs() <= reach
    return torch.where(near_BN, probability_BN, 0.0).sum(-1).float()
