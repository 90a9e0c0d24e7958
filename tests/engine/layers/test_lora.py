"""Low-rank changes by slot: both forms of the operation mean the same."""

from __future__ import annotations

import pytest
import torch
from legato_engine.kernels import ops, reference
from legato_engine.kernels.parameters import AdapterRows


def slots_of(ranks, inputs, outputs, max_rank):
    """Slots of these ranks after slot 0, zero beyond the ranks."""
    generator = torch.Generator().manual_seed(0)
    a_SRI = torch.zeros(len(ranks) + 1, max_rank, inputs, dtype=torch.float64)
    b_SRO = torch.zeros(len(ranks) + 1, max_rank, outputs, dtype=torch.float64)
    for slot, rank in enumerate(ranks, start=1):
        a_SRI[slot, :rank] = torch.randn(rank, inputs, generator=generator)
        b_SRO[slot, :rank] = torch.randn(rank, outputs, generator=generator)
    return a_SRI, b_SRO, torch.tensor([0, *ranks])


@pytest.mark.parametrize("slots", [[0], [2], [1, 0, 3, 2, 0, 1, 1], [0] * 7])
@pytest.mark.parametrize("rank", [16, 32])
def test_gathered_and_row_by_row_agree(slots, rank):
    """Each row gets its own slot's product, one slot may speak for all, and slot 0 adds nothing."""
    a_SRI, b_SRO, rank_S = slots_of([3, 16, 8], 24, 40, 32)
    x_TI, out_TO = torch.randn(7, 24).double(), torch.randn(7, 40).double()
    slot_T = torch.tensor(slots)
    expected = out_TO.clone()
    for row, slot in enumerate(slots if len(slots) > 1 else slots * 7):
        expected[row] += b_SRO[slot].t() @ (a_SRI[slot] @ x_TI[row])
    gathered = reference.add_low_rank_gathered(out_TO, x_TI, a_SRI, b_SRO, slot_T, rank)
    torch.testing.assert_close(gathered, expected)
    rows = AdapterRows(slot_T, rank_S, rank)
    torch.testing.assert_close(ops.add_low_rank(out_TO, x_TI, a_SRI, b_SRO, rows), expected)
