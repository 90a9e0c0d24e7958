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
    """Give the system what has been freed: glibc keeps freed weights, a few hundred MiB of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def _table(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
