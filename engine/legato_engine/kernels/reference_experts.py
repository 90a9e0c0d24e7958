"""Experts and their adapters in plain torch; shape legend as in `ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato_engine.kernels import activations, pages
from legato_engine.kernels.experts import ExpertWeights, Routes
from legato_engine.kernels.low_rank import AdapterRows, ExpertAdapters, ExpertMap
from legato_engine.kernels.reference import add_low_rank_rows, whole_blocks


def route(logits_TX: torch.Tensor, num_active: int) -> Routes:
    best_TK, expert_TK = logits_TX.topk(num_active, dim=-1)
    return Routes(expert_TK, best_TK.float().softmax(-1).to(logits_TX.dtype))


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
    """For few tokens: copies the weights for each."""
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
    """In float32, rounded once."""
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
    out_TO = F.linear(x_TI, layer.weight_XOI[expert].to(x_TI.dtype))
    return out_TO if layer.scale_XO is None else _scaled(out_TO, layer.scale_XO[expert])


def _own_expert(x_TI: torch.Tensor, layer: ExpertWeights, expert_T: torch.Tensor) -> torch.Tensor:
    weight_TOI = pages.taken(layer.weight_XOI, expert_T).to(x_TI.dtype)
    out_TO = torch.bmm(weight_TOI, x_TI[:, :, None])[:, :, 0]
    return out_TO if layer.scale_XO is None else _scaled(out_TO, layer.scale_XO[expert_T])


def _scaled(out: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (out.float() * scale).to(out.dtype)


def _shared_out(out_TKD: torch.Tensor, routes: Routes) -> torch.Tensor:
    """In float32, in order, rounded once."""
    share_TK1 = routes.share_TK.float()[:, :, None]
    terms = (share_TK1 * out_TKD.float()).unbind(1)
    total_TD = terms[0]
    for term_TD in terms[1:]:
        total_TD = total_TD + term_TD
    return total_TD.to(out_TKD.dtype)
