"""Orphans, which end as zombies of this process when it is the first one of a container."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_GET_CHILD_SUBREAPER = 37
_TASKS = Path("/proc/self/task")


def inherits_orphans() -> bool:
    """Whether the kernel gives children of processes that died to this one."""
    if os.getpid() == 1:
        return True
    answer = ctypes.c_int(0)
    failed = ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return not failed and bool(answer.value)


async def reap_orphans(interval: float = 1.0) -> None:
    """Reap zombies that nothing else waits for, every `interval` seconds; never return.

    The event loop waits for the children that it started as soon as they end. A zombie of two
    looks is therefore not one of them, because the loop runs between the looks.
    """
    seen: set[int] = set()
    while True:
        await asyncio.sleep(interval)
        zombies = set(_zombies())
        for pid in zombies & seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - does not wait
        seen = zombies


def _zombies() -> Iterator[int]:
    for task in _TASKS.iterdir():
        with suppress(OSError):  # a thread or a child that has ended meanwhile
            for pid in (task / "children").read_text().split():
                stat = Path(f"/proc/{pid}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "Z":
                    yield int(pid)
