"""Rows of e4m3 values with a scale each; shape legend as in `row_ops`."""

from __future__ import annotations

import dataclasses

import torch

E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """`values` e4m3 [..., K]; multiplied by `scale`, float32 [..., 1], they are the row."""

    values: torch.Tensor
    scale: torch.Tensor
