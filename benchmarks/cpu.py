"""What a process used, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_ENGINE = "legato_engine.engine.process"


def seconds(pid: int) -> float:
    """CPU time of all threads of a process, in steps of a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def engine(service: int) -> int:
    """The one engine process that a service process has started."""
    (found,) = (each for each in children(service) if runs(each, _ENGINE))
    return found


def children(pid: int) -> list[int]:
    """Processes that a process started and that still run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int, module: str) -> bool:
    """Whether a process was started as `python -m module`."""
    return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
