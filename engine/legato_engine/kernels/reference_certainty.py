"""How sure a model is of a token with a value: the specification of `cuda/sources/value_argmax.cu`.

Rows do not interact. Shape legend: B tokens, V vocabulary, N bins.
"""

from __future__ import annotations

import torch


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
