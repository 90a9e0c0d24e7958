"""Report of this machine for `legato info`: devices, kernels, versions, models; without torch."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from legato_engine.device.host import GpuDevice, NoGpuError, available_memory, gpus
from legato_engine.hub import store
from legato_engine.kernels.cpu.compiler import CannotCompileError, instructions_of, library_path
from legato_engine.kernels.cuda.capability import Gpu, Kernels

_PACKAGES = ("legato", "legato-server", "legato-tiny", "torch", "transformers", "cuda-bindings")
_DRIVER = Path("/proc/driver/nvidia/version")


def gpu_kernels(device: GpuDevice) -> dict[str, str]:
    """Return each group of kernels with why the GPU does not run it, or an empty text."""
    gpu = Gpu(device.capability)
    return {kernels.title: gpu.lacks(kernels) or "" for kernels in Kernels}


def report(models: str = "") -> dict[str, object]:
    """Return the document; `models` is the folder of pulled models, empty for the default."""
    instructions = reason = ""
    try:  # as an engine does, which may compile them
        instructions = instructions_of(ctypes.CDLL(str(library_path())))
    except (CannotCompileError, OSError) as error:
        reason = str(error)
    document: dict[str, object] = {
        "versions": _versions(),
        "cpu": {
            "name": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": available_memory(),
            "instructions": instructions,
            "kernels": "legato" if instructions else "torch",
            "reason": reason,
        },
        "driver": _driver(),
        "models": _models(models),
        "models_folder": str(store.model_folder(models, "NAME").parent),
    }
    try:
        found = gpus()
    except NoGpuError as error:
        return {**document, "gpus": [], "no_gpu": str(error)}
    described = [
        {
            "device": each.device,
            "name": each.name,
            "capability": ".".join(map(str, each.capability)),
            "memory_bytes": each.num_bytes,
            "kernels": gpu_kernels(each),
        }
        for each in found
    ]
    return {**document, "gpus": described, "no_gpu": ""}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _processor() -> str:
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


def _driver() -> str:
    """Return the version of NVIDIA's kernel module, empty without one."""
    if not _DRIVER.is_file():
        return ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text())
    return match[0] if match else ""


def _models(models: str) -> list[dict[str, object]]:
    folders = {name: store.model_folder(models, name) for name in store.MODELS}
    return [
        {"model": name, "folder": str(folder), "bytes": manifest.num_bytes}
        for name, folder in folders.items()
        if (manifest := store.read_manifest(folder)) is not None
    ]


if __name__ == "__main__":
    print(json.dumps(report(os.environ.get("LEGATO_MODELS", ""))))  # noqa: T201
    sys.exit()
