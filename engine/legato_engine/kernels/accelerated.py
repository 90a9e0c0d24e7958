"""Stages that a GPU runs in a launch or two."""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda import capability, draft_layer
from legato_engine.kernels.cuda.control_flow import Switch, WhileLoop
from legato_engine.kernels.cuda.draft_layer import DraftLayerKernels, DraftSizes, DraftWeights
from legato_engine.kernels.cuda.drafting import DraftKernels, DraftTensors, LookupKernel
from legato_engine.kernels.cuda.image_pipeline import ImagePipeline, StitchPool
from legato_engine.kernels.cuda.sampling import RowTensors, SampledTokens, Sampler
from legato_engine.kernels.proposer import Proposer

__all__ = [
    "DraftKernels",
    "DraftSizes",
    "DraftTensors",
    "DraftWeights",
    "ImagePipeline",
    "LookupKernel",
    "RowTensors",
    "SampledTokens",
    "Sampler",
    "StitchPool",
    "Switch",
    "WhileLoop",
    "draft_layer_proposer",
    "missing_kernels",
]


def missing_kernels(device: torch.device) -> dict[str, str] | None:
    """Return the groups of kernels that a GPU does not run, each with the reason; None on a CPU."""
    if device.type != "cuda":
        return None
    gpu = capability.gpu_of(device)
    return {each.title: reason for each in capability.Kernels if (reason := gpu.lacks(each))}


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
