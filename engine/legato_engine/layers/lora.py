"""Low-rank adapters in device slots at fixed addresses.

Shape legend: L layers, S slots, R ranks, I and O a map's inputs and outputs, T tokens, W any width;
X experts, Q ranks of one; N layers, or experts of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from legato_engine.device.base import Stream
from legato_engine.kernels import ops
from legato_engine.kernels.parameters import (
    AdapterRows,
    ExpertAdapters,
    ExpertMap,
    LowRankMap,
    LowRankStack,
)

LEAST_RANK = 8
"""Launches are captured for ranks that double from this one."""


Widths = tuple[int, int]
"""A map's inputs and outputs."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """Adapters by the names of a layer's maps: B(A x) is added to a map's result, without a factor.

    Layers with experts follow those in `maps`; the tensors of `experts` are [L, S, X, Q, W].
    """

    maps: Mapping[str, LowRankStack]
    experts: Mapping[str, LowRankStack] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        stacks = *self.maps.values(), *self.experts.values()
        return tuple(tensor for stack in stacks for tensor in stack)

    @property
    def num_layers(self) -> int:
        """Return the number of layers without experts."""
        return len(next(iter(self.maps.values())).a_LSRI)

    @property
    def rank(self) -> int:
        """Return the rank, which experts share."""
        return next(iter(self.maps.values())).a_LSRI.shape[-2]

    def pinned(self) -> AdapterWeights:
        maps, experts = (
            {
                name: LowRankStack(*(tensor.pin_memory() for tensor in stack))
                for name, stack in each.items()
            }
            for each in (self.maps, self.experts)
        )
        return AdapterWeights(maps, experts)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertBankSizes:
    """The layers with experts; `num_active` experts share an adapter's rank."""

    num_layers: int
    num_experts: int
    num_active: int
    maps: Mapping[str, Widths]

    def rank(self, rank: int) -> int:
        """One expert's share of an adapter's rank, at least 1."""
        return max(1, rank // self.num_active)


@dataclasses.dataclass(frozen=True, slots=True)
class BankSizes:
    """`num_layers` of which `maps` are adapted, then the layers with experts."""

    num_layers: int
    maps: Mapping[str, Widths]
    experts: ExpertBankSizes | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerAdapters:
    """One layer's adapters, and the tokens that read them."""

    maps: Mapping[str, LowRankMap]
    rows: AdapterRows

    def add(self, out_TO: torch.Tensor, x_TI: torch.Tensor, *maps: str) -> torch.Tensor:
        """Add the changes of maps of x to their results side by side in `out`, in place."""
        first = 0
        for name in maps:
            a_SRI, b_SRO = self.maps[name]
            part_TO = out_TO.narrow(-1, first, b_SRO.shape[-1])
            ops.add_low_rank(part_TO, x_TI, a_SRI, b_SRO, self.rows)
            first += b_SRO.shape[-1]
        return out_TO


BlockAdapters = LayerAdapters | ExpertAdapters


class AdapterBank:
    """Slots for adapters up to `max_rank`; slot 0 means no adapter and stays zero.

    All methods but `write` run on the compute stream.
    """

    def __init__(
        self, sizes: BankSizes, *, num_slots: int, max_rank: int, like: torch.Tensor
    ) -> None:
        """`like`: the model's device and dtype."""
        slots, experts = num_slots + 1, sizes.experts

        def empty(maps: Mapping[str, Widths], *shape: int) -> dict[str, LowRankStack]:
            return {
                name: LowRankStack(*(like.new_zeros(*shape, width) for width in widths))
                for name, widths in maps.items()
            }

        routed = {}
        if experts is not None:
            room = experts.num_layers, slots, experts.num_experts, experts.rank(max_rank)
            routed = empty(experts.maps, *room)
        maps = empty(sizes.maps, sizes.num_layers, slots, max_rank)
        self.weights = AdapterWeights(maps, routed)
        self.rank_S = like.new_zeros(slots, dtype=torch.int64)
        """Each slot's own rank."""
        self.expert_rank_S = like.new_zeros(slots, dtype=torch.int64)
        """Each slot's rank for one expert."""
        self._numbers = torch.arange(max_rank + 1, device=like.device)
        self.max_rank = max_rank
        self.ranks = _doubling(max_rank)
        """The ranks of captured launches, ascending."""
        self._sizes = sizes

    @property
    def values_per_slot(self) -> int:
        return sum(tensor[:, 0].numel() for tensor in self.weights.tensors)

    def write(self, slot: int, adapter: AdapterWeights, stream: Stream) -> None:
        """Enqueue copies to a slot that no earlier launch reads, zeros from slot 0 among them."""
        for slots, own in zip(self.weights.tensors, adapter.tensors, strict=True):
            room, zeros = slots[:, slot], slots[:, 0]
            if own.dim() == 3:
                _fill(room, own, zeros, stream)
                continue
            for layer in zip(room, own, zeros, strict=True):
                _fill(*layer, stream)
        ranks = [(self.rank_S, adapter.rank)]
        if self._sizes.experts is not None:
            ranks.append((self.expert_rank_S, self._sizes.experts.rank(adapter.rank)))
        for rank_S, rank in ranks:
            stream.copy(rank_S[slot : slot + 1], self._numbers[rank : rank + 1])

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
        weights, dense = self.weights, self.weights.num_layers
        if index < dense:
            maps = {
                name: LowRankMap(*(tensor[index] for tensor in stack))
                for name, stack in weights.maps.items()
            }
            return LayerAdapters(maps, self.rows)
        up, down = (
            ExpertMap(*(tensor[index - dense] for tensor in stack))
            for stack in weights.experts.values()
        )
        return ExpertAdapters(up, down, self.expert_rows)


def _fill(
    room_NRW: torch.Tensor, own_NRW: torch.Tensor, zeros_NRW: torch.Tensor, stream: Stream
) -> None:
    rank = own_NRW.shape[1]
    parts = [(room_NRW[:, :rank], own_NRW)]
    if rank < room_NRW.shape[1]:
        parts.append((room_NRW[:, rank:], zeros_NRW[:, rank:]))
    for to, source in parts:
        stream.copy_rows(*(each.view(len(each), -1) for each in (to, source)))


def _doubling(most: int) -> tuple[int, ...]:
    ranks = [min(LEAST_RANK, most)]
    while ranks[-1] < most:
        ranks.append(min(2 * ranks[-1], most))
    return tuple(ranks)
