"""Experts' weights and tokens' routes to them; shape legend as in `ops`."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One bias-free map of every expert: the model's dtype, or e4m3 with a scale per output."""

    weight_XOI: torch.Tensor
    scale_XO: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The K experts of each token (int64), and their shares in the model's dtype."""

    expert_TK: torch.Tensor
    share_TK: torch.Tensor
