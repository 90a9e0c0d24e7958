"""Host memory."""

from __future__ import annotations

import ctypes
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


def _table(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
