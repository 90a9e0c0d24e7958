"""Experts as two grouped products of torch, whose group bounds stay on the device.

Nothing is read on the host. bfloat16 products read only the weights of experts with tokens; weights
of fewer bits are all widened first, which pays off for many tokens only. Shape legend as in
`kernels.ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from legato_engine.kernels.cuda.capability import Kernels, runs
from legato_engine.kernels.parameters import (
    AdapterRows,
    ExpertAdapters,
    ExpertMap,
    ExpertWeights,
    Routes,
)
from legato_engine.kernels.reference import gate, own_low_rank

_ALIGNMENT = 8  # values of 16 bytes, at multiples of which rows begin
_MANY = 64  # tokens from which widening pays off


def can_group(x_TD: torch.Tensor, up: ExpertWeights, down: ExpertWeights) -> bool:
    """Return whether each product is one kernel and widening pays off."""
    is_plain = up.weight_XOI.dtype is down.weight_XOI.dtype is torch.bfloat16
    return (
        x_TD.dtype is torch.bfloat16
        and (is_plain or len(x_TD) >= _MANY)
        and all(size % _ALIGNMENT == 0 for size in down.weight_XOI.shape[1:])
        and runs(Kernels.GROUPED_EXPERTS, x_TD.device)
    )


def experts(
    x_TD: torch.Tensor,
    routes: Routes,
    up: ExpertWeights,
    down: ExpertWeights,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    num_active = routes.expert_TK.shape[1]
    expert_J, order_J = routes.expert_TK.flatten().sort(stable=True)
    bound_X = _bounds(expert_J, len(up.weight_XOI))
    token_J = order_J // num_active
    x_JD = x_TD[token_J]
    both_JO = _product(x_JD, up, expert_J, bound_X)
    if adapters is not None:
        where = adapters.rows, token_J, expert_J, bound_X
        both_JO = both_JO + _change(x_JD, adapters.up, *where)
    inner_JI = gate(both_JO)
    sorted_JD = _product(inner_JI, down, expert_J, bound_X)
    if adapters is not None:
        sorted_JD = sorted_JD + _change(inner_JI, adapters.down, *where)
    out_JD = torch.empty_like(sorted_JD)
    out_JD[order_J] = sorted_JD
    out_TKD = out_JD.view(-1, num_active, x_TD.shape[1]).float()
    return (out_TKD * routes.share_TK.float()[:, :, None]).sum(1).to(x_TD.dtype)


def _bounds(expert_J: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the end of each expert's pairs, int32."""
    expert_X = torch.arange(num_experts, device=expert_J.device)
    return torch.searchsorted(expert_J, expert_X, right=True, out_int32=True)


def _product(
    x_JI: torch.Tensor, layer: ExpertWeights, expert_J: torch.Tensor, bound_X: torch.Tensor
) -> torch.Tensor:
    weight_XIO = layer.dense(x_JI.dtype).transpose(1, 2)
    out_JO = F.grouped_mm(x_JI, weight_XIO, offs=bound_X)
    if layer.scale_XO is None:
        return out_JO
    return (out_JO.float() * layer.scale_XO[expert_J]).to(x_JI.dtype)


def _change(
    x_JI: torch.Tensor,
    change: ExpertMap,
    rows: AdapterRows,
    token_J: torch.Tensor,
    expert_J: torch.Tensor,
    bound_X: torch.Tensor,
) -> torch.Tensor:
    """Compute an adapter's change of a map, grouped if all tokens read one slot."""
    if len(rows.slot_T) > 1:
        return own_low_rank(x_JI, change, rows.slot_T[token_J], expert_J, rows.rank)
    padding = (0, 0, 0, -rows.rank % _ALIGNMENT)
    a_XRI, b_XRO = (
        F.pad(each[:, :, : rows.rank].index_select(0, rows.slot_T)[0], padding) for each in change
    )
    low_JR = F.grouped_mm(x_JI, a_XRI.transpose(1, 2), offs=bound_X)
    return F.grouped_mm(low_JR, b_XRO, offs=bound_X)
