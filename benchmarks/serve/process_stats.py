"""CPU time and memory of a process, as the kernel counts them."""

from __future__ import annotations

import os
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_ENGINE = "legato_engine.core.process"


def seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in steps of a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def engine(service: int) -> int:
    """Return the engine process that a service process has started."""
    (found,) = (each for each in children(service) if runs(each, _ENGINE))
    return found


def children(pid: int) -> list[int]:
    """Return the running child processes of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int, module: str) -> bool:
    """Say whether a process was started as `python -m module`."""
    return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
