"""A bank's adapters in the form of the step kernels."""

from __future__ import annotations

from typing import cast

import torch

from legato_engine.kernels.cuda.adapters import LowRank, Slots, StepAdapters
from legato_engine.kernels.cuda.expert_adapters import ExpertLowRank, RoutedAdapters
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.fused_sizes import expert_sizes
from legato_engine.models.moondream.fused_weights import expert_slots, mlp_slots
from legato_engine.models.moondream.text import Text, TextBlock


class FusedAdapters:
    """The adapter kernels over a bank's slots."""

    def __init__(self, config: MoondreamConfig, text: Text, bank: AdapterBank) -> None:
        sizes, device, experts = config.text, text.wte.device, bank.weights.experts
        self._bank = bank
        self._mlps = [
            mlp_slots(cast(TextBlock, block), bank, layer)
            for layer, block in zip(range(bank.num_mlps), text.blocks, strict=False)
        ]
        self._low_rank = LowRank(sizes.dim, sizes.ff_dim, bank.max_rank, device)
        self._expert_low_rank: ExpertLowRank | None = None
        if experts is not None:
            dtype = torch.float8_e4m3fn if text.has_fp8_experts else text.wte.dtype
            room = experts.fc1_a_LSRD.shape[-2]
            self._expert_low_rank = ExpertLowRank(
                sizes.dim, expert_sizes(config, dtype), room, device
            )
            self._experts = expert_slots(bank, bank.num_mlps)

    def step(self, slot_R: torch.Tensor) -> StepAdapters:
        """Return the adapters of a step whose rows have these adapter slots."""
        own = self._low_rank, self._mlps, Slots(slot_R, self._bank.rank_S)
        if self._expert_low_rank is None:
            return StepAdapters(*own)
        slots = Slots(slot_R, self._bank.expert_rank_S)
        return RoutedAdapters(*own, self._expert_low_rank, self._experts, slots)
