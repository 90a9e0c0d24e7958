"""What the times of the resident kernel's steps, and of captured ones, depend on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from legato_engine.kernels.cuda.compiler import sources_hash
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.module import checked
from legato_engine.kernels.cuda.resident import RING_STAGES, UNDER_WAY, source_folder
from legato_engine.kernels.resident_builds import Build
from legato_engine.speculative.block_policy import BlockPolicy


def subject(
    sizes: DecoderSizes,
    num_layers: int,
    builds: Collection[Build],
    policy: BlockPolicy | None,
    device: torch.device,
) -> Mapping[str, str]:
    """By name: the GPU, its driver, the model's sizes, and all sources of kernels."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "driver": str(checked(driver.cuDriverGetVersion())),
        "model": f"{sizes}, {num_layers} layers",
        "builds": ", ".join(f"{build.kind} {build.rows}" for build in builds),
        "drafts": "" if policy is None else f"{type(policy).__name__} of {policy.max_block}",
        "sources": sources_hash(source_folder()),
        "rings": f"{RING_STAGES}, {UNDER_WAY}",
    }
