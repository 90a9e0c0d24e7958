"""Low-rank adapters in device slots at fixed addresses.

Shape legend: L layers, S slots, R ranks, D width, F inner width, T tokens, W any width; X experts,
Q ranks of one.
"""

from __future__ import annotations

import dataclasses

import torch

from legato_engine.kernels import ops
from legato_engine.kernels.parameters import AdapterRows, ExpertAdapters, ExpertMap

LEAST_RANK = 8
"""Launches are captured for ranks that double from this one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """Adapters of all MLPs: B(A x) is added to the results of fc1 and fc2, without a factor.

    An adapter's own tensors lack S. Those of experts are [L, S, X, Q, W], and fc1 covers both
    halves of the gated unit.
    """

    fc1_a_LSRD: torch.Tensor
    fc1_b_LSRF: torch.Tensor
    fc2_a_LSRF: torch.Tensor
    fc2_b_LSRD: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.fc1_a_LSRD, self.fc1_b_LSRF, self.fc2_a_LSRF, self.fc2_b_LSRD


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A decoder's adapters; layers with experts follow those with MLPs."""

    mlps: MlpWeights
    experts: MlpWeights | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.mlps.tensors, *(self.experts.tensors if self.experts is not None else ()))

    @property
    def rank(self) -> int:
        """Divided among experts."""
        return self.mlps.fc1_a_LSRD.shape[-2]

    def pinned(self) -> AdapterWeights:
        mlps, experts = (
            None if each is None else MlpWeights(*(tensor.pin_memory() for tensor in each.tensors))
            for each in (self.mlps, self.experts)
        )
        assert mlps is not None, "a decoder's MLPs are always there, if only in no layers"
        return AdapterWeights(mlps, experts)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertBankSizes:
    """The layers with experts; `num_active` experts share an adapter's rank."""

    num_layers: int
    num_experts: int
    num_active: int
    inner_dim: int

    def rank(self, rank: int) -> int:
        """One expert's share of an adapter's rank, at least 1."""
        return max(1, rank // self.num_active)


@dataclasses.dataclass(frozen=True, slots=True)
class BankSizes:
    """`num_layers` with an MLP, then the layers with experts."""

    num_layers: int
    dim: int
    ff_dim: int
    experts: ExpertBankSizes | None = None

    def widths(self) -> tuple[int, int, int, int]:
        return self.dim, self.ff_dim, self.ff_dim, self.dim

    def expert_widths(self) -> tuple[int, int, int, int]:
        assert self.experts is not None, "there are none"
        return self.dim, 2 * self.experts.inner_dim, self.experts.inner_dim, self.dim


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MlpAdapters:
    """One layer's adapters, and the tokens that read them."""

    weights: tuple[torch.Tensor, ...]  # as `MlpWeights.tensors`, without L
    rows: AdapterRows

    def add_fc1(self, out_TF: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        return ops.add_low_rank(out_TF, x_TD, self.weights[0], self.weights[1], self.rows)

    def add_fc2(self, out_TD: torch.Tensor, x_TF: torch.Tensor) -> torch.Tensor:
        return ops.add_low_rank(out_TD, x_TF, self.weights[2], self.weights[3], self.rows)


BlockAdapters = MlpAdapters | ExpertAdapters


class AdapterBank:
    """Slots for adapters up to `max_rank`; slot 0 means no adapter and stays zero.

    All methods run on the compute stream.
    """

    def __init__(
        self, sizes: BankSizes, *, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> None:
        """`like`: the model's device and dtype."""
        slots, experts = num_slots + 1, sizes.experts
        shape = sizes.num_layers, slots, max_rank
        mlps = MlpWeights(*(like.new_zeros(*shape, width) for width in sizes.widths()))
        routed = None
        if experts is not None:
            room = experts.num_layers, slots, experts.num_experts, experts.rank(max_rank)
            routed = MlpWeights(*(like.new_zeros(*room, width) for width in sizes.expert_widths()))
        self.weights = AdapterWeights(mlps, routed)
        self.rank_S = like.new_zeros(slots, dtype=torch.int64)
        """Each slot's own rank."""
        self.expert_rank_S = like.new_zeros(slots, dtype=torch.int64)
        """Each slot's rank for one expert."""
        self.max_rank = max_rank
        self.ranks = _doubling(max_rank)
        """The ranks of captured launches, ascending."""
        self._sizes = sizes

    @property
    def num_mlps(self) -> int:
        return self._sizes.num_layers

    @property
    def values_per_slot(self) -> int:
        return sum(tensor[:, 0].numel() for tensor in self.weights.tensors)

    def write(self, slot: int, adapter: AdapterWeights) -> None:
        """Fill a slot that no earlier launch reads."""
        for slots, own in zip(self.weights.tensors, adapter.tensors, strict=True):
            room, rank = slots[:, slot], own.shape[-2]
            room[..., :rank, :].copy_(own, non_blocking=True)
            room[..., rank:, :].zero_()
        self.rank_S[slot] = adapter.rank
        if self._sizes.experts is not None:
            self.expert_rank_S[slot] = self._sizes.experts.rank(adapter.rank)

    def bucket(self, rank: int) -> int:
        """Return the captured rank for a rank, 0 for none."""
        return next(each for each in self.ranks if each >= rank) if rank else 0

    def rows(self, slot_T: torch.Tensor, rank: int) -> AdaptedRows:
        """`rank` is one of `ranks`."""
        experts, rows = self._sizes.experts, AdapterRows(slot_T, self.rank_S, rank)
        if experts is None:
            return AdaptedRows(self.weights, rows, rows)
        routed = AdapterRows(slot_T, self.expert_rank_S, experts.rank(rank))
        return AdaptedRows(self.weights, rows, routed)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """The tokens of a launch by slot; `expert_rows` have the ranks of one expert."""

    weights: AdapterWeights
    rows: AdapterRows
    expert_rows: AdapterRows

    def layer(self, index: int) -> BlockAdapters:
        dense = len(self.weights.mlps.fc1_a_LSRD)
        if index < dense:
            return MlpAdapters(tuple(each[index] for each in self.weights.mlps.tensors), self.rows)
        assert self.weights.experts is not None, "a layer past the last"
        up_a, up_b, down_a, down_b = (each[index - dense] for each in self.weights.experts.tensors)
        return ExpertAdapters(ExpertMap(up_a, up_b), ExpertMap(down_a, down_b), self.expert_rows)


def _doubling(most: int) -> tuple[int, ...]:
    ranks = [min(LEAST_RANK, most)]
    while ranks[-1] < most:
        ranks.append(min(2 * ranks[-1], most))
    return tuple(ranks)
