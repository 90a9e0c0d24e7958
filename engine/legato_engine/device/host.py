"""Host memory, and the GPUs that the driver reports; without torch."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

_PROC = Path("/proc")
_GROUP = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, group: Path = _GROUP) -> int:
    """Bytes that can be allocated without swapping, within the process's cgroup."""
    free = _table(proc / "meminfo")["MemAvailable:"] * 1024
    limit = group / "memory.max"
    if not limit.is_file() or not (text := limit.read_text().strip()).isdigit():
        return free
    used, kinds = int((group / "memory.current").read_text()), _table(group / "memory.stat")
    reclaimable = kinds["active_file"] + kinds["inactive_file"]
    return max(0, min(free, int(text) - used + reclaimable))


def return_freed_memory() -> None:
    """Return freed memory to the system; takes milliseconds for hundreds of MiB.

    glibc keeps freed memory below the highest block in use. No effect with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuDevice:
    """GPU as the driver describes it; an integrated one shares the host's memory."""

    device: str
    name: str
    capability: tuple[int, int]
    num_bytes: int
    is_integrated: bool = False


class NoGpuError(Exception):
    """The driver reports no GPU; the text is the reason."""


def gpus() -> list[GpuDevice]:
    """List the GPUs, at least one.

    Raises:
        NoGpuError: there is none, or no driver.
    """
    try:
        from cuda.bindings import driver

        status = driver.cuInit(0)[0]
    except ImportError:
        raise NoGpuError("the package cuda-bindings is not installed") from None
    except RuntimeError:
        raise NoGpuError("NVIDIA's driver is not installed: there is no libcuda") from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise NoGpuError(f"the driver does not start: {status.name}")
    attribute = driver.CUdevice_attribute
    _, count = driver.cuDeviceGetCount()
    found = []
    for number in range(count):
        _, device = driver.cuDeviceGet(number)
        major, minor, integrated = (
            int(driver.cuDeviceGetAttribute(each, device)[1])
            for each in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED,
            )
        )
        name = driver.cuDeviceGetName(128, device)[1].rstrip(b"\0").decode()
        size = int(driver.cuDeviceTotalMem(device)[1])
        found.append(GpuDevice(f"cuda:{number}", name, (major, minor), size, bool(integrated)))
    if not found:
        raise NoGpuError("the driver reports no GPU")
    return found


def _table(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
