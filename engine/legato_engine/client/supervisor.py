"""Child processes: start, end and restart delays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
from collections.abc import Sequence

EXIT_UNSERVABLE = os.EX_CONFIG
"""Exit code of an engine whose configuration cannot be served; a restart would not help."""

STACKS_SIGNAL = signal.SIGUSR2
"""Has an engine write the stacks of all threads."""


SERVED_AFTER = 1.0
"""Seconds for which a ready process counts as one that served."""


class Backoff:
    """Delays before restarts: none after a process that served, else doubled.

    Up to `cap`, or up to `ready_cap` after a process that got ready: that one starts well and dies
    of its first request each time, or is killed. The delays keep it from taking up the machine.
    """

    def __init__(self, *, first: float, cap: float, ready_cap: float) -> None:
        self._first = first
        self._cap = cap
        self._ready_cap = ready_cap
        self._next = first

    def delay(self, *, ready: bool, served: bool) -> float:
        if served:
            self._next = self._first
            return 0.0
        delay = min(self._next, self._ready_cap) if ready else self._next
        self._next = min(delay * 2, self._cap)
        return delay


class ChildProcess:
    """A child process in a session of its own; stdout and stderr are inherited."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def spawn(cls, command: Sequence[str], inherited: Sequence[int] = ()) -> ChildProcess:
        """Start `command` with the `inherited` descriptors.

        Raises:
            OSError: the command cannot be executed.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=tuple(inherited),
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return the exit code, negative for a signal."""
        return await self._process.wait()

    def dump_stacks(self) -> None:
        """Have a process that handles `STACKS_SIGNAL` write its stacks; it goes on."""
        if self.alive:
            self._process.send_signal(STACKS_SIGNAL)

    def bytes_read(self) -> int:
        """From files and devices so far, pages of mapped files included; 0 when unknown."""
        try:
            lines = pathlib.Path(f"/proc/{self.pid}/io").read_text().splitlines()
        except OSError:
            return 0
        counts = {name: int(count) for name, _, count in (line.partition(":") for line in lines)}
        return counts.get("rchar", 0) + counts.get("read_bytes", 0)

    async def wait_at_most(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self.wait())), seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
