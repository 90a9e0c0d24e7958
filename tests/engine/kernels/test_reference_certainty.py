"""How sure a model is of a value, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from legato_engine.kernels.reference import concentration, existence


def test_existence_is_between_the_token_and_the_end():
    """Other tokens do not matter, and a token is certain where the end is not allowed."""
    logits_BV = torch.tensor([[0.0, 9.0, 1.0], [2.0, -5.0, 1.0], [-math.inf, 0.0, 1.0]])
    seen = existence(logits_BV, torch.tensor([2, 2, 2]), 0).tolist()
    assert seen == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 1.0])


@pytest.mark.parametrize(
    ("chosen", "reach", "near"), [(0, 1, 1 + 2), (3, 1, 3 + 4 + 5), (5, 2, 4 + 5 + 6)]
)
def test_concentration_is_the_mass_around_a_bin(chosen, reach, near):
    """Bins up to the reach count, to both sides, and the edges of the axis cut it."""
    masses = [1, 2, 3, 4, 5, 6]
    logits_BN = torch.tensor(masses).float().log()[None]
    seen = concentration(logits_BN, torch.tensor([chosen]), reach).item()
    assert seen == pytest.approx(near / 21)


def test_rows_do_not_interact():
    """A row has the same bits alone and in any batch."""
    logits_BN = torch.randn(7, 1024, generator=torch.Generator().manual_seed(0)) * 5
    bin_B = logits_BN.argmax(-1)
    together = concentration(logits_BN, bin_B, 32), existence(logits_BN, bin_B, 3)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(concentration(logits_BN[one], bin_B[one], 32), together[0][one])
        assert torch.equal(existence(logits_BN[one], bin_B[one], 3), together[1][one])
