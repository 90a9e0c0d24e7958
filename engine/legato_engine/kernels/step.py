"""A decode step of a whole decoder by kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda import decoder, tau_decoder
from legato_engine.kernels.cuda.adapters import LowRankMaps
from legato_engine.kernels.cuda.attention import GROUP, HEAD_DIM, MAX_TOKENS, StepPositions
from legato_engine.kernels.cuda.capability import Kernels, runs, total_memory
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    CudaDecoder,
    DecoderSizes,
    HeadWeights,
    Part,
    Stages,
    StepCache,
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
from legato_engine.kernels.cuda.tau_decoder import ExpertLowRank, ExpertSizes, TauDecoder, TauSizes
from legato_engine.kernels.parameters import DecoderLayer

__all__ = [
    "DEFAULT_STAGES",
    "GROUP",
    "HEAD_DIM",
    "MAX_TOKENS",
    "DecoderSizes",
    "ExpertLowRank",
    "ExpertSizes",
    "FoldedCodes",
    "LayerCodes",
    "LowRankMaps",
    "Part",
    "QuantisedHead",
    "QuantisedLayer",
    "Stages",
    "StepCache",
    "StepMap",
    "StepPositions",
    "TauSizes",
    "has_resident_kernel",
    "has_room_for_copy",
    "has_step_kernels",
    "head_codes",
    "layer_codes",
    "packed_head",
    "quantised_head",
    "quantised_layer",
    "step_decoder",
    "supports_decoder",
    "supports_experts",
]

_COPY_SHARE = 1 / 16
"""Of a GPU's memory, what a second copy of the decoder's maps may take by default."""


def supports_decoder(sizes: DecoderSizes, device: torch.device, dtype: torch.dtype) -> bool:
    return decoder.supported(sizes, device, dtype)


def has_step_kernels(device: torch.device) -> bool:
    return runs(Kernels.STEPS, device)


def has_room_for_copy(num_bytes: int, device: torch.device) -> bool:
    """Return whether so much is little enough of a GPU's memory to hold weights twice."""
    return num_bytes < _COPY_SHARE * total_memory(device)


def has_resident_kernel(device: torch.device) -> bool:
    return runs(Kernels.RESIDENT, device)


def supports_experts(sizes: TauSizes) -> bool:
    return tau_decoder.supported(sizes)


def step_decoder(
    sizes: DecoderSizes | TauSizes,
    layers: Sequence[DecoderLayer],
    head: HeadWeights,
    cache: StepCache,
    stages: Stages = DEFAULT_STAGES,
    adapters: LowRankMaps | None = None,
    expert_adapters: ExpertLowRank | None = None,
) -> CudaDecoder | TauDecoder:
    """Pack the layers of a decoder for steps of up to its `max_tokens` tokens."""
    if isinstance(sizes, TauSizes):
        gained = [packed_tau_layer(layer, sizes.decoder) for layer in layers]
        return TauDecoder(sizes, gained, head, cache, stages, adapters, expert_adapters)
    packed = [packed_layer(layer, sizes, rotated=True) for layer in layers]
    return CudaDecoder(sizes, packed, head, cache, stages, adapters)
