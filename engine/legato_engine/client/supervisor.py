"""Child processes: start, end and restart delays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

EXIT_UNSERVABLE = os.EX_CONFIG
"""Exit code of an engine whose configuration cannot be served; a restart would not help."""

_ABORT_GRACE = 2.0  # seconds to dump stacks


class Backoff:
    """Exponential delays, doubled per crash; a run of `stable` seconds resets them."""

    def __init__(self, *, first: float, cap: float, stable: float) -> None:
        self._first = first
        self._cap = cap
        self._stable = stable
        self._next = first

    def delay_after(self, uptime: float) -> float:
        if uptime >= self._stable:
            self._next = self._first
        delay = self._next
        self._next = min(self._next * 2, self._cap)
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

    async def abort(self) -> None:
        """End a process that hangs."""
        if self.alive:
            self._process.send_signal(signal.SIGABRT)
            await self.wait_at_most(_ABORT_GRACE)
        self.kill()

    async def wait_at_most(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self.wait())), seconds)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
