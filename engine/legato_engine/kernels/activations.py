"""Activations whose bits depend on an element's value only.

On a CPU torch computes whole vectors with one function and the elements after them with another
that differs in the last bit, and it splits large tensors among threads anywhere. So the bits of
`F.gelu`, `F.silu`, `F.softplus`, `torch.sigmoid` and `torch.exp2` depend on an element's index, the
number of elements and the number of threads, and a row's bits on its batch. In float64 both
functions agree to a few units in the last place, which rounding to the input's dtype hides, so
results are also equal on every CPU. `torch.tanh`, `torch.exp`, softmax and norms are as they should
be.

On a GPU every element goes through the same instructions, so torch's own operations are used there:
float64 would take 2 to 64 times their arithmetic and twice their memory traffic.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def gelu(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    """Compute the tanh form of the gelu, or with "none" the exact one.

    The tanh form is x * sigmoid(2u): x / 2 * (1 + tanh(u)) cancels for negative u, where rounding
    from float64 would not hide the last bit of the tanh.
    """
    if x.device.type != "cpu":
        return F.gelu(x, approximate=approximate)
    wide = x.double()
    if approximate == "none":
        return F.gelu(wide).to(x.dtype)
    share = wide.square().mul_(_CUBIC).add_(_LINEAR).mul_(wide).sigmoid_()
    return share.mul_(wide).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) if x.device.type != "cpu" else F.silu(x.double()).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) if x.device.type != "cpu" else x.double().sigmoid_().to(x.dtype)
