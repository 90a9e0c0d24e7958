"""What operations are told of adapters: who reads which, and those of experts.

Shape legend: T tokens, S slots, X experts, R ranks, I and O a map's inputs and outputs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """Which adapter slot each of T tokens reads, all int64; slot 0 is none.

    `slot_T` of one element speaks for all tokens. `rank_S` are the slots' own ranks, and `rank` is
    at least that of every slot named: known on the host, so that a step's cost is.
    """

    slot_T: torch.Tensor
    rank_S: torch.Tensor
    rank: int


class ExpertMap(NamedTuple):
    """A layer's slots for one map of every expert: B(A x) is added to what the map gives."""

    a_SXRI: torch.Tensor
    b_SXRO: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertAdapters:
    """One layer's adapters of experts and the tokens that read them; ranks are an expert's."""

    up: ExpertMap
    down: ExpertMap
    rows: AdapterRows
