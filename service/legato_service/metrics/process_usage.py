"""Memory, CPU time and open files of a process, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from legato_service.metrics.snapshot import Snapshot

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM, _RESIDENT = 11, 12, 21  # fields of `stat` after the name


class ProcessUsage(NamedTuple):
    """Bytes, seconds, and a count."""

    resident: int
    cpu: float
    open_files: int


def usage(pid: int) -> ProcessUsage | None:
    """None when there is no such process."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        open_files = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    cpu = (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK
    return ProcessUsage(int(fields[_RESIDENT]) * _PAGE, cpu, open_files)


def write(snapshot: Snapshot, name: str, pid: int) -> None:
    found = usage(pid)
    if found is not None:
        snapshot.add("legato_process_resident_memory_bytes", found.resident, name)
        snapshot.add("legato_process_cpu_seconds", found.cpu, name)
        snapshot.add("legato_process_open_fds", found.open_files, name)
