"""Stages that a GPU runs in a launch or two; elsewhere functions return None or run torch."""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda import draft_layer
from legato_engine.kernels.cuda.draft_layer import DraftLayerKernels, DraftSizes, DraftWeights
from legato_engine.kernels.cuda.drafting import DraftKernels, LookupKernel
from legato_engine.kernels.cuda.image_pipeline import ImagePipeline, StitchPool
from legato_engine.kernels.cuda.sampling import RowTensors, Sampler
from legato_engine.speculative.lookup import LookupProposer
from legato_engine.speculative.proposer import Proposer

__all__ = [
    "DraftKernels",
    "DraftSizes",
    "DraftWeights",
    "ImagePipeline",
    "RowTensors",
    "Sampler",
    "StitchPool",
    "draft_kernels",
    "draft_layer_proposer",
    "lookup_proposer",
]


def draft_kernels(max_block: int, vocab_size: int, device: torch.device) -> DraftKernels | None:
    return DraftKernels(max_block, vocab_size) if device.type == "cuda" else None


def lookup_proposer(device: torch.device) -> Proposer:
    return LookupKernel() if device.type == "cuda" else LookupProposer()


def draft_layer_proposer(
    sizes: DraftSizes,
    weights: DraftWeights,
    kv: tuple[torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
) -> Proposer | None:
    device, dtype = weights.words_VD.device, weights.words_VD.dtype
    if not draft_layer.supported(sizes, device, dtype, kv[0].dtype):
        return None
    return DraftLayerKernels(sizes, weights, kv, angles)
