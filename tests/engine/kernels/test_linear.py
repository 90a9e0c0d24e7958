"""The linear map on the CPU treats every row alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from legato_engine.kernels import ops


@pytest.mark.parametrize(("dim", "out"), [(320, 960), (64, 300), (48, 7)])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 13])
@pytest.mark.parametrize("biased", [True, False])
def test_rows_have_the_same_bits_in_any_batch(dim, out, count, biased):
    """A row gives the same bits whichever rows, and however many, run with it."""
    generator = torch.Generator().manual_seed(count)
    x_TD = torch.randn(16, dim, generator=generator)
    weight = torch.randn(out, dim, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    whole = ops.linear(x_TD, weight, bias)
    assert torch.equal(ops.linear(x_TD[:count], weight, bias), whole[:count])
    moved = ops.linear(x_TD[:count].roll(1, 0), weight, bias).roll(-1, 0)
    assert torch.equal(moved, whole[:count])
    torch.testing.assert_close(whole, F.linear(x_TD, weight, bias))


def test_leading_shape_is_kept():
    """Any number of leading dimensions, none of them a multiple of a block."""
    weight, bias = torch.randn(5, 4), torch.randn(5)
    assert ops.linear(torch.randn(2, 3, 4), weight, bias).shape == (2, 3, 5)
