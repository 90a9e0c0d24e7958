"""What the operations on experts are given: their weights, and who goes where.

Shape legend as in `ops`.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One linear layer of every expert, without a bias.

    Weights have the model's dtype, or e4m3 and a float32 scale for each output.
    """

    weight_XOI: torch.Tensor
    scale_XO: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The K experts of each token (int64), and how much each counts, in the model's dtype."""

    expert_TK: torch.Tensor
    share_TK: torch.Tensor
