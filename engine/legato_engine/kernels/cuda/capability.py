"""GPU features by compute capability: the one table of what kernels may use on which GPU."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from typing import TYPE_CHECKING

from legato_engine.errors import InvalidField

if TYPE_CHECKING:
    import torch

PTX_SWITCH = "LEGATO_KERNEL_PTX"
"""Environment variable for tests: a virtual architecture such as compute_80, whose PTX the driver
compiles. Kernels then use the features and the shared memory of that architecture only."""

_Capability = tuple[int, int]


class Feature(enum.Enum):
    """Hardware features that kernels declare, each since a capability; titles are for people."""

    MMA = "mma", (8, 0)
    ASYNC_COPIES = "cp.async", (8, 0)
    BARRIERS = "mbarrier", (8, 0)
    E4M3 = "e4m3 conversions", (8, 9)
    FP8_MMA = "fp8 mma", (8, 9)
    BULK_COPIES = "bulk copies", (9, 0)
    CLUSTERS = "clusters", (9, 0)
    OVERLAP = "programmatic dependent launch", (9, 0)
    REGISTERS = "register reallocation", (9, 0)
    WGMMA = "wgmma", (9, 0)

    def __init__(self, title: str, since: _Capability) -> None:
        self.title = title
        self.since = since


_ONLY = {Feature.REGISTERS, Feature.WGMMA}
"""Of the very capability that they came with, as far as our kernels use them."""

_SHARED_KIB = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 8): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
"""Largest shared memory of a thread block."""
_LEAST_SHARED_KIB = 99  # of GPUs that the table does not name

_MACROS = {
    "HAS_BULK_COPIES": Feature.BULK_COPIES,
    "HAS_E4M3": Feature.E4M3,
    "HAS_OVERLAP": Feature.OVERLAP,
}
"""Constants of the sources that tell them what an architecture has."""

_STEPS = frozenset({Feature.MMA, Feature.ASYNC_COPIES, Feature.BARRIERS})
_TENSOR_COPIES = frozenset({Feature.BULK_COPIES})


class Kernels(enum.Enum):
    """Groups of kernels, with the features that each uses."""

    STEPS = "decode steps, sampling, values, drafts and adapters", _STEPS
    TOWER_ATTENTION = (
        "attention of the vision tower",
        frozenset({Feature.MMA, Feature.ASYNC_COPIES}),
    )
    TOWER_WARPGROUPS = (
        "attention of the vision tower by warpgroups",
        _TENSOR_COPIES | {Feature.WGMMA},
    )
    TOWER_PRODUCTS = "products of the vision tower with tile counters", frozenset({Feature.WGMMA})
    TOWER_FP8 = "vision tower in fp8", frozenset({Feature.FP8_MMA})
    GROUPED_EXPERTS = "grouped products of experts", _TENSOR_COPIES
    RESIDENT = "resident kernel", _TENSOR_COPIES | {Feature.CLUSTERS, Feature.REGISTERS}

    def __init__(self, title: str, features: frozenset[Feature]) -> None:
        self.title = title
        self.features = features


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """Features and limits of a compute capability; `is_virtual` if the driver compiles its PTX."""

    capability: _Capability
    is_virtual: bool = False

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a thread block may have."""
        return _SHARED_KIB.get(self.capability, _LEAST_SHARED_KIB) * 1024

    def has(self, feature: Feature) -> bool:
        own, since = self.capability, feature.since
        return own == since or (own > since and feature not in _ONLY)

    def lacks(self, kernels: Kernels) -> str | None:
        """Return why a group of kernels does not run here, or None."""
        missing = [
            each.title for each in Feature if each in kernels.features and not self.has(each)
        ]
        if not missing:
            return None
        return f"compute capability {self.name} has no {' and no '.join(missing)}"

    @property
    def name(self) -> str:
        return ".".join(map(str, self.capability))

    def arch(self, *, own: bool = False) -> str:
        """Return NVRTC's name; `own` has instructions that later architectures do not have."""
        number = "".join(map(str, self.capability))
        if self.is_virtual:
            return f"compute_{number}"
        return f"sm_{number}{'a' if own else ''}"


HOPPER = Gpu((9, 0))


def gpu_of_arch(arch: str) -> Gpu:
    """Parse NVRTC's name of an architecture, such as sm_90a or compute_80."""
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    return Gpu((int(digits[:-1]), int(digits[-1])), is_virtual=kind == "compute")


def macros(arch: str) -> dict[str, int]:
    gpu = gpu_of_arch(arch)
    return {name: int(gpu.has(feature)) for name, feature in _MACROS.items()}


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return what kernels may use on a CUDA device.

    Raises:
        InvalidField: the test switch names no architecture that the device can run.
    """
    import torch  # the table itself is read without it

    capability = torch.cuda.get_device_capability(device)
    switch = os.environ.get(PTX_SWITCH)
    if not switch:
        return Gpu(capability)
    known = {Gpu(each, is_virtual=True).arch(): each for each in _SHARED_KIB if each <= capability}
    if switch not in known:
        names = ", ".join(known)
        raise InvalidField(f"{PTX_SWITCH} is {switch}; use one of {names}", field="device")
    return Gpu(known[switch], is_virtual=True)


def current_gpu() -> Gpu:
    """Return the current device's; Hopper, by which sizes are checked, where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return HOPPER
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


def runs(kernels: Kernels, device: torch.device) -> bool:
    return device.type == "cuda" and gpu_of(device).lacks(kernels) is None


def total_memory(device: torch.device) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)
