"""Stages that a GPU runs in a launch or two; elsewhere functions return None or run torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from legato_engine.device.base import CapturedGraph
from legato_engine.kernels.cuda import capability, draft_layer
from legato_engine.kernels.cuda.control_flow import Switch, WhileLoop
from legato_engine.kernels.cuda.draft_layer import DraftLayerKernels, DraftSizes, DraftWeights
from legato_engine.kernels.cuda.drafting import DraftKernels, DraftTensors, LookupKernel
from legato_engine.kernels.cuda.image_pipeline import ImagePipeline, StitchPool
from legato_engine.kernels.cuda.sampling import RowTensors, SampledTokens, Sampler
from legato_engine.kernels.decode_loop import AnyLoop
from legato_engine.kernels.proposer import LookupProposer, Proposer
from legato_engine.speculation import BlockPolicy

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
    "captured_loop",
    "captured_switch",
    "draft_kernels",
    "draft_layer_proposer",
    "lookup_proposer",
    "missing_kernels",
]


def missing_kernels(device: torch.device) -> dict[str, str] | None:
    """Return the groups of kernels that a GPU does not run, each with the reason; None on a CPU."""
    if device.type != "cuda":
        return None
    gpu = capability.gpu_of(device)
    return {each.title: reason for each in capability.Kernels if (reason := gpu.lacks(each))}


def draft_kernels(
    policy: BlockPolicy, *, num_rows: int, vocab_size: int, device: torch.device
) -> DraftKernels | None:
    if device.type != "cuda":
        return None
    return DraftKernels(policy, num_rows=num_rows, vocab_size=vocab_size, device=device)


def captured_switch(index: torch.Tensor, works: Sequence[Callable[[], None]]) -> Switch | None:
    """Make a switch on the device; None unless all works are captured graphs."""
    graphs = [work.graph for work in works if isinstance(work, CapturedGraph)]
    return Switch(index, graphs) if len(graphs) == len(works) else None


def captured_loop(works: Sequence[Callable[[], None]], loop: AnyLoop) -> WhileLoop | None:
    """Make a loop on the device; None on a CPU. Works need not be captured graphs."""
    return WhileLoop(works, loop) if loop.step.is_cuda else None


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
