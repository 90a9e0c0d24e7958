"""A decode step of a whole decoder by kernels.

Shape legend as in `cuda.decoder`; S adapter slots, L layers, K experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from legato_engine.kernels.cuda import decoder, tau_decoder
from legato_engine.kernels.cuda.adapters import LowRankMaps, Slots, StepAdapters
from legato_engine.kernels.cuda.attention import GROUP, HEAD_DIM, MAX_TOKENS, StepPositions
from legato_engine.kernels.cuda.capability import Kernels, runs, total_memory
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    CudaDecoder,
    DecoderSizes,
    HeadWeights,
    LayerBoundary,
    Part,
    Stages,
)
from legato_engine.kernels.cuda.packed_layers import (
    FoldedCodes,
    LayerCodes,
    QuantisedHead,
    QuantisedLayer,
    StepMap,
    head_codes,
    layer_codes,
    packed_head,
    packed_layer,
    packed_tau_layer,
    quantised_head,
    quantised_layer,
)
from legato_engine.kernels.cuda.tau_decoder import (
    ExpertLowRank,
    ExpertSizes,
    RoutedAdapters,
    TauDecoder,
    TauSizes,
)
from legato_engine.kernels.parameters import Affine, DecoderLayer, ExpertSlots, MlpSlots

__all__ = [
    "DEFAULT_STAGES",
    "GROUP",
    "HEAD_DIM",
    "MAX_TOKENS",
    "AdapterStep",
    "DecoderSizes",
    "DecoderStep",
    "ExpertSizes",
    "ExpertSlotSet",
    "FoldedCodes",
    "LayerCodes",
    "Part",
    "QuantisedHead",
    "QuantisedLayer",
    "Stages",
    "StepAdapters",
    "StepCache",
    "StepMap",
    "StepPositions",
    "TauSizes",
    "has_resident_kernel",
    "has_step_kernels",
    "head_codes",
    "layer_codes",
    "quantised_head",
    "quantised_layer",
    "supports_decoder",
    "supports_experts",
    "total_memory",
]

_RunLayers = Callable[
    [
        torch.Tensor,
        StepPositions,
        torch.Tensor,
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor],
        Collection[Part],
        StepAdapters | None,
    ],
    None,
]


def supports_decoder(sizes: DecoderSizes, device: torch.device, dtype: torch.dtype) -> bool:
    return decoder.supported(sizes, device, dtype)


def has_step_kernels(device: torch.device) -> bool:
    return runs(Kernels.STEPS, device)


def has_resident_kernel(device: torch.device) -> bool:
    return runs(Kernels.RESIDENT, device)


def supports_experts(sizes: TauSizes) -> bool:
    return tau_decoder.supported(sizes)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepCache:
    """A step's keys and values, and its rotations, float32 [P, 16].

    `scale_L2` (float32) are each layer's units of keys and values in e4m3.
    """

    k_LNHSE: torch.Tensor
    v_LNHSE: torch.Tensor
    scale_L2: torch.Tensor | None
    cos_PR: torch.Tensor
    sin_PR: torch.Tensor


class DecoderStep:
    """A decoder's layers and head for up to `max_tokens` tokens at a time.

    Steps share scratch memory and must not overlap. `expert_LBK` is that of `TauDecoder`; None
    without experts.
    """

    def __init__(
        self,
        sizes: DecoderSizes | TauSizes,
        layers: Sequence[DecoderLayer],
        head: Affine,
        head_norm: Affine,
        cache: StepCache,
        stages: Stages = DEFAULT_STAGES,
        quantised: HeadWeights | None = None,
    ) -> None:
        """`quantised` stands for head and norm."""
        self._cache = cache
        self._head = packed_head([head], head_norm) if quantised is None else quantised
        self._decoder, self._run_layers = _decoder(sizes, layers, cache, stages)
        self.parts = self._decoder.parts
        self.max_tokens = self._decoder.max_tokens
        self.expert_LBK: torch.Tensor | None = None
        if isinstance(self._decoder, TauDecoder):
            self.expert_LBK = self._decoder.expert_LBK

    def layers(
        self,
        x_BD: torch.Tensor,
        positions: StepPositions,
        parts: Collection[Part] = tuple(Part),
        adapters: StepAdapters | None = None,
    ) -> None:
        """See `Decoder.layers`."""
        keys, values = self._cache.k_LNHSE, self._cache.v_LNHSE
        angles = self._cache.cos_PR, self._cache.sin_PR
        self._run_layers(x_BD, positions, keys, values, angles, parts, adapters)

    def head(self, x_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        self._decoder.head(x_BD, self._head, logits_BV)


def _decoder(
    sizes: DecoderSizes | TauSizes,
    layers: Sequence[DecoderLayer],
    cache: StepCache,
    stages: Stages,
) -> tuple[CudaDecoder | TauDecoder, _RunLayers]:
    device = cache.cos_PR.device
    if isinstance(sizes, TauSizes):
        tau = TauDecoder(sizes, len(layers), device, stages, cache.scale_L2)
        tau_layers = [packed_tau_layer(layer, sizes.decoder) for layer in layers]
        return tau, lambda x_BD, *rest: tau.layers(x_BD, tau_layers, *rest)
    boundary = LayerBoundary(sizes, len(layers), device)
    scales = None if cache.scale_L2 is None else [*cache.scale_L2]
    plain = CudaDecoder(sizes, device, stages, boundary, scales)
    plain_layers = [packed_layer(layer, sizes, rotated=True) for layer in layers]
    return plain, lambda x_BD, *rest: plain.layers(x_BD, plain_layers, *rest)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertSlotSet:
    """The slots of all layers with experts, for `capacity` ranks of one expert."""

    sizes: ExpertSizes
    layers: Mapping[int, ExpertSlots]
    rank_S: torch.Tensor
    capacity: int


class AdapterStep:
    """The kernels that add adapters to a step, over slots whose addresses never change."""

    def __init__(
        self,
        sizes: DecoderSizes,
        mlps: Sequence[MlpSlots],
        rank_S: torch.Tensor,
        max_rank: int,
        experts: ExpertSlotSet | None,
    ) -> None:
        device = rank_S.device
        self._mlps = mlps
        self._rank_S = rank_S
        self._low_rank = LowRankMaps(sizes.dim, sizes.ff_dim, max_rank, device)
        self._experts = experts
        self._expert_low_rank = None
        if experts is not None:
            self._expert_low_rank = ExpertLowRank(
                sizes.dim, experts.sizes, experts.capacity, device
            )

    def step(self, slot_R: torch.Tensor) -> StepAdapters:
        own = self._low_rank, self._mlps, Slots(slot_R, self._rank_S)
        if self._experts is None or self._expert_low_rank is None:
            return StepAdapters(*own)
        slots = Slots(slot_R, self._experts.rank_S)
        return RoutedAdapters(*own, self._expert_low_rank, self._experts.layers, slots)
