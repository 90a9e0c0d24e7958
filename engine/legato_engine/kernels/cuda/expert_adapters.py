"""Adapters of experts in a decode step: what B(A x) adds to both of their maps, each token its own.

Shape legend: as in `gained`; S slots, Q ranks of a slot's room for one expert, O a map's outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.adapters import Slots, StepAdapters
from legato_engine.kernels.cuda.decoder import MAX_TOKENS
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.cuda.tau_decoder_stages import ExpertSizes
from legato_engine.kernels.low_rank import ExpertMap, ExpertSlots

_OUTPUTS = 64  # of a thread block of `expert_expand`
_TOKENS = 16  # that it has beside each other, if there are so many
_WAVE = 3  # thread blocks of `expert_shrink` that a multiprocessor runs at once


class ExpertLowRank:
    """The kernels for one model's experts, and the memory between them; steps must not overlap."""

    def __init__(self, dim: int, experts: ExpertSizes, room: int, device: torch.device) -> None:
        """`room`: ranks that a slot has for each expert."""
        outputs = 2 * experts.inner_dim
        self._shrinks, self._expands = {}, {}
        for first, inputs, made in ((True, dim, outputs), (False, experts.inner_dim, dim)):
            sizes = expert_adapter_defines(experts, room, first=first)
            shrink = Module("expert_adapters.cu", {**sizes, "WIDTH": inputs})
            expand = Module("expert_adapters.cu", {**sizes, "OUTPUTS": made})
            self._shrinks[first] = shrink.kernel("expert_shrink")
            self._expands[first] = expand.kernel("expert_expand")
        self._threads, self._room = 32 * experts.num_active, room
        pairs = MAX_TOKENS, experts.num_active
        self._low_BKQ = torch.zeros(*pairs, room, device=device)
        self.first_BKO = torch.zeros(*pairs, outputs, device=device)
        """What the last `expand` of the first map left, likewise of the second."""
        self.second_BD = torch.zeros(MAX_TOKENS, dim, device=device)

    def shrink(
        self,
        x: torch.Tensor,
        logits_BX: torch.Tensor | None,
        change: ExpertMap,
        slots: Slots,
        expert_BK: torch.Tensor,
        row_B: torch.Tensor,
    ) -> None:
        """A x. With `logits_BX` of the tokens' x [B, D], which chooses the experts; else of the
        pairs' [B, K, I].
        """
        batch = len(row_B)
        wave = max(1, skinny_gemm.num_processors() * _WAVE // batch)
        self._shrinks[logits_BX is not None].launch(
            (min(self._room, wave), batch, 1),
            self._threads,
            (
                *(x, logits_BX, change.a_SXRI, slots.rank_S, slots.slot_R, row_B),
                *(expert_BK, self._low_BKQ, batch),
            ),
            overlap=True,
        )

    def expand(
        self,
        share_BK: torch.Tensor | None,
        change: ExpertMap,
        slots: Slots,
        expert_BK: torch.Tensor,
        row_B: torch.Tensor,
    ) -> None:
        """B of that: of each pair, or with `share_BK` the sum of a token's."""
        out, batch = self.first_BKO if share_BK is None else self.second_BD, len(row_B)
        self._expands[share_BK is None].launch(
            (out.shape[-1] // _OUTPUTS, min(batch, _TOKENS), 1),
            self._threads,
            (
                *(self._low_BKQ, expert_BK, share_BK, change.b_SXRO),
                *(slots.rank_S, slots.slot_R, row_B, out, batch),
            ),
            overlap=True,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerChanges:
    """What adapters change of one layer's experts in one step: four kernels, in this order."""

    kernels: ExpertLowRank
    weights: ExpertSlots
    slots: Slots
    expert_BK: torch.Tensor
    row_B: torch.Tensor

    def first(self, x_BD: torch.Tensor, logits_BX: torch.Tensor) -> None:
        """Of the first map, between router and experts."""
        where = self.weights.up, self.slots, self.expert_BK, self.row_B
        self.kernels.shrink(x_BD, logits_BX, *where)
        self.kernels.expand(None, *where)

    def shrink(self, inner_BKI: torch.Tensor) -> None:
        """Of the second map A's part, right behind the first map."""
        where = self.weights.down, self.slots, self.expert_BK, self.row_B
        self.kernels.shrink(inner_BKI, None, *where)

    def expand(self, share_BK: torch.Tensor) -> None:
        """B's part, right in front of the second map."""
        where = self.weights.down, self.slots, self.expert_BK, self.row_B
        self.kernels.expand(share_BK, *where)

    @property
    def of_first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the first map's kernel is told: the change, and which tokens have one."""
        return self.kernels.first_BKO, self.slots.slot_R, self.row_B

    @property
    def of_second(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of the second map's."""
        return self.kernels.second_BD, self.slots.slot_R, self.row_B


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RoutedAdapters(StepAdapters):
    """All layers' adapters for one step, those of layers with experts by their number."""

    expert_kernels: ExpertLowRank
    expert_layers: Mapping[int, ExpertSlots]
    expert_slots: Slots

    def experts(self, layer: int, expert_BK: torch.Tensor, row_B: torch.Tensor) -> LayerChanges:
        """Of one layer; `expert_BK` is where its experts are left."""
        weights = self.expert_layers[layer]
        return LayerChanges(self.expert_kernels, weights, self.expert_slots, expert_BK, row_B)


def expert_adapter_defines(experts: ExpertSizes, room: int, *, first: bool) -> dict[str, int]:
    """Constants of `expert_adapters.cu` but for its widths."""
    return {
        "EXPERTS": experts.num_experts,
        "ACTIVE": experts.num_active,
        "EXPERT_BYTES": experts.weight_bytes,
        "FIRST": int(first),
        "RANKS": room,
    }
