"""On a GPU: a layer whose rows begin anywhere is as exact as any other.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import pytest
import torch
from legato_engine.kernels import ops

CUDA = torch.device("cuda", 0)
LIMITS = {torch.bfloat16: 0.004, torch.float32: 1e-5}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("inputs", [588, 589, 592])
@pytest.mark.parametrize("dtype", LIMITS)
def test_rows_that_are_not_aligned(inputs, dtype):
    """The product over exactly its inputs, in the shape that was asked for."""
    torch.manual_seed(0)
    x_2TI = torch.randn(2, 729, inputs, device=CUDA).to(dtype)
    weight_OI = (torch.randn(1152, inputs, device=CUDA) / inputs**0.5).to(dtype)
    bias_O = torch.randn(1152, device=CUDA).to(dtype)
    out_2TO = ops.linear(x_2TI, weight_OI, bias_O)
    exact_2TO = x_2TI.double() @ weight_OI.double().t() + bias_O.double()
    assert out_2TO.shape == (2, 729, 1152)
    assert out_2TO.dtype is dtype
    error = (out_2TO.double() - exact_2TO).norm() / exact_2TO.norm()
    assert error < LIMITS[dtype]
