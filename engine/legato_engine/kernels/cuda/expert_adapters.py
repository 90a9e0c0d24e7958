"""Low-rank adapters of a decode step's experts: B(A x) of each token's own slot.

Shape legend as in `tau_decoder`; S slots, Q ranks of a slot for one expert, O outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.adapters import Slots, StepAdapters
from legato_engine.kernels.cuda.attention import MAX_TOKENS
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.cuda.tau_decoder_stages import ExpertSizes
from legato_engine.kernels.low_rank import ExpertMap, ExpertSlots

_OUTPUTS = 64  # of a thread block of `expert_expand`
_TOKENS = 16  # thread blocks of `expert_expand` along the tokens, at most
_WAVE = 3  # concurrent thread blocks of `expert_shrink` on a multiprocessor


class ExpertLowRank:
    """The kernels and their scratch memory; steps must not overlap."""

    def __init__(self, dim: int, experts: ExpertSizes, capacity: int, device: torch.device) -> None:
        """`capacity`: ranks of a slot for each expert."""
        outputs = 2 * experts.inner_dim
        self._shrinks, self._expands = {}, {}
        for first, inputs, made in ((True, dim, outputs), (False, experts.inner_dim, dim)):
            sizes = expert_adapter_defines(experts, capacity, first=first)
            shrink = Module("expert_adapters.cu", {**sizes, "WIDTH": inputs})
            expand = Module("expert_adapters.cu", {**sizes, "OUTPUTS": made})
            self._shrinks[first] = shrink.kernel("expert_shrink")
            self._expands[first] = expand.kernel("expert_expand")
        self._threads, self._room = 32 * experts.num_active, capacity
        pairs = MAX_TOKENS, experts.num_active
        self._low_BKQ = torch.zeros(*pairs, capacity, device=device)
        self.first_BKO = torch.zeros(*pairs, outputs, device=device)
        """The last change of the first map; `second_BD` that of the second."""
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
        """A x of tokens [B, D], whose `logits_BX` choose the experts, or of pairs [B, K, I]."""
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
        """B of that, for each pair, or summed by `share_BK`."""
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
    """One layer's changes in one step: four kernels, in this order."""

    kernels: ExpertLowRank
    weights: ExpertSlots
    slots: Slots
    expert_BK: torch.Tensor
    row_B: torch.Tensor

    def first(self, x_BD: torch.Tensor, logits_BX: torch.Tensor) -> None:
        """Between router and experts."""
        where = self.weights.up, self.slots, self.expert_BK, self.row_B
        self.kernels.shrink(x_BD, logits_BX, *where)
        self.kernels.expand(None, *where)

    def shrink(self, inner_BKI: torch.Tensor) -> None:
        """After the first map."""
        where = self.weights.down, self.slots, self.expert_BK, self.row_B
        self.kernels.shrink(inner_BKI, None, *where)

    def expand(self, share_BK: torch.Tensor) -> None:
        """Before the second map."""
        where = self.weights.down, self.slots, self.expert_BK, self.row_B
        self.kernels.expand(share_BK, *where)

    @property
    def of_first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kernels.first_BKO, self.slots.slot_R, self.row_B

    @property
    def of_second(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kernels.second_BD, self.slots.slot_R, self.row_B


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RoutedAdapters(StepAdapters):
    """The adapters of all layers for one step."""

    expert_kernels: ExpertLowRank
    expert_layers: Mapping[int, ExpertSlots]
    expert_slots: Slots

    def experts(self, layer: int, expert_BK: torch.Tensor, row_B: torch.Tensor) -> LayerChanges:
        """The chosen experts will be in `expert_BK`."""
        weights = self.expert_layers[layer]
        return LayerChanges(self.expert_kernels, weights, self.expert_slots, expert_BK, row_B)


def expert_adapter_defines(experts: ExpertSizes, capacity: int, *, first: bool) -> dict[str, int]:
    return {
        "EXPERTS": experts.num_experts,
        "ACTIVE": experts.num_active,
        "EXPERT_BYTES": experts.weight_bytes,
        "FIRST": int(first),
        "RANKS": capacity,
    }
