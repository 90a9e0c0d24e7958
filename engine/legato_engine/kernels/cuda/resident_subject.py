"""What the times of the resident kernel's steps, and of captured ones, depend on."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Collection, Iterator, Mapping
from importlib.resources.abc import Traversable

import torch

from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.module import checked
from legato_engine.kernels.resident_builds import Build
from legato_engine.speculative.block_policy import BlockPolicy

PACKAGES = ("legato_engine.kernels.cuda", "legato_engine.resident")


def subject(
    sizes: DecoderSizes,
    num_layers: int,
    builds: Collection[Build],
    policy: BlockPolicy | None,
    device: torch.device,
) -> Mapping[str, str]:
    """By name: the GPU, its driver, the model's sizes, and the code of all kernels."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "driver": str(checked(driver.cuDriverGetVersion())),
        "model": f"{sizes}, {num_layers} layers",
        "builds": ", ".join(f"{build.kind} {build.rows}" for build in builds),
        "drafts": "" if policy is None else f"{type(policy).__name__} of {policy.max_block}",
        "code": code_hash(),
    }


def code_hash() -> str:
    """Of kernels, of how they are launched, and of the resident kernel's program."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted(code_files(package), key=lambda each: each.name):
            digest.update(f"{package}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def code_files(package: str) -> Iterator[Traversable]:
    yield from _files(importlib.resources.files(package))


def _files(folder: Traversable) -> Iterator[Traversable]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files(each)
        elif each.name.endswith((".py", ".cu", ".cuh")):
            yield each
