"""Low-rank adapters in slots.

Shape legend: T tokens, S slots, X experts, R ranks, I and O a map's inputs and outputs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from legato_engine.kernels.parameters import Affine


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The adapter slot of each token, or one of all tokens; int64, slot 0 is none.

    `rank_S` are the slots' own ranks. `rank`, at least that of every slot named, is known on the
    host because shapes depend on it.
    """

    slot_T: torch.Tensor
    rank_S: torch.Tensor
    rank: int


class LowRankMap(NamedTuple):
    """A layer's slots for one map: B(A x) is added to the map's result."""

    a_SRI: torch.Tensor
    b_SRO: torch.Tensor


class ExpertMap(NamedTuple):
    """The same of every expert."""

    a_SXRI: torch.Tensor
    b_SXRO: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpSlots:
    """A layer's slots for its MLP, and the norm that it reads."""

    norm: Affine
    fc1: LowRankMap
    fc2: LowRankMap


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertSlots:
    """A layer's slots for its experts; ranks are those of one expert."""

    up: ExpertMap
    down: ExpertMap


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapters:
    """A layer's expert adapters and the tokens that read them."""

    up: ExpertMap
    down: ExpertMap
    rows: AdapterRows
