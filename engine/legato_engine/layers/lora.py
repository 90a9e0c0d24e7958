"""Low-rank adapters of MLPs in device slots at fixed addresses.

Shape legend: L layers, S slots, R ranks, D width, F inner width, T tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels import ops
from legato_engine.kernels.ops import AdapterRows

LEAST_RANK = 8
"""Launches are captured for ranks that double from here."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """The adapters of all MLPs: B(A x) is added to what fc1 and fc2 give, without another factor.

    Of one adapter the tensors are without S.
    """

    fc1_a_LSRD: torch.Tensor
    fc1_b_LSRF: torch.Tensor
    fc2_a_LSRF: torch.Tensor
    fc2_b_LSRD: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All four, in this order."""
        return self.fc1_a_LSRD, self.fc1_b_LSRF, self.fc2_a_LSRF, self.fc2_b_LSRD


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpAdapters:
    """One layer's adapters and the tokens that read them."""

    weights: tuple[torch.Tensor, ...]  # as `MlpWeights.tensors`, without L
    rows: AdapterRows

    def add_fc1(self, out_TF: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """What fc1 gives for x, with the change to it."""
        return ops.add_low_rank(out_TF, x_TD, self.weights[0], self.weights[1], self.rows)

    def add_fc2(self, out_TD: torch.Tensor, x_TF: torch.Tensor) -> torch.Tensor:
        """What fc2 gives for x, with the change to it."""
        return ops.add_low_rank(out_TD, x_TF, self.weights[2], self.weights[3], self.rows)


class AdapterBank:
    """Room for `num_slots` adapters up to `max_rank`; slot 0 is none and stays zero.

    All methods run on the compute stream.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        dim: int,
        ff_dim: int,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
    ) -> None:
        """`like` has the device and the dtype of the model's weights."""
        shape = num_layers, num_slots + 1, max_rank
        self.weights = MlpWeights(*(like.new_zeros(*shape, w) for w in (dim, ff_dim, ff_dim, dim)))
        self.rank_S = like.new_zeros(num_slots + 1, dtype=torch.int64)
        """The slots' own ranks."""
        self.max_rank = max_rank
        self.ranks = _doubling(max_rank)
        """The ranks of captured launches, rising."""

    @property
    def values_per_slot(self) -> int:
        """Numbers that an adapter of the highest rank has."""
        return sum(tensor[:, 0].numel() for tensor in self.weights.tensors)

    def write(self, slot: int, adapter: MlpWeights) -> None:
        """Put an adapter into a slot that no launch before this reads."""
        for slots_LSRW, own_LRW in zip(self.weights.tensors, adapter.tensors, strict=True):
            rank = own_LRW.shape[1]
            slots_LSRW[:, slot, :rank].copy_(own_LRW, non_blocking=True)
            slots_LSRW[:, slot, rank:].zero_()
        self.rank_S[slot] = rank

    def bucket(self, rank: int) -> int:
        """The rank that a launch is captured for, 0 for none."""
        return next(each for each in self.ranks if each >= rank) if rank else 0

    def rows(self, slot_T: torch.Tensor, rank: int) -> AdaptedRows:
        """The tokens of a launch by their slots, see `ops.AdapterRows`; `rank` is of `ranks`."""
        return AdaptedRows(self.weights, AdapterRows(slot_T, self.rank_S, rank))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """The tokens of a launch, and the slots that they read."""

    weights: MlpWeights
    rows: AdapterRows

    def layer(self, index: int) -> MlpAdapters:
        """One layer's part."""
        return MlpAdapters(tuple(each[index] for each in self.weights.tensors), self.rows)


def _doubling(most: int) -> tuple[int, ...]:
    ranks = [min(LEAST_RANK, most)]
    while ranks[-1] < most:
        ranks.append(min(2 * ranks[-1], most))
    return tuple(ranks)
