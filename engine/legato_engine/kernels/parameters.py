"""A decoder's parameters as its checkpoint has them.

Shape legend: D width, H heads, O outputs, I inputs, P positions, Z = 2 H gains, C = 3 D queries,
keys and values.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from legato_engine.kernels.experts import ExpertWeights


class Affine(NamedTuple):
    """A linear map [O, I] or a norm's scale [D], and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DenseMlp:
    """`fc2(gelu(fc1(x)))`."""

    fc1: Affine
    fc2: Affine


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertMlp:
    """A router and its experts; see `ops.experts`."""

    router: Affine
    up: ExpertWeights
    down: ExpertWeights


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TauWeights:
    """Gains on queries and values: a map of the token, bf16, and the position's part, float32."""

    weight_ZC: torch.Tensor
    position_PH: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A layer whose attention and MLP read the same norm and are added to the residual stream."""

    norm: Affine
    qkv: Affine
    proj: Affine
    mlp: DenseMlp | ExpertMlp
    tau: TauWeights | None = None
