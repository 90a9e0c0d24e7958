"""One incarnation of the engine process, and how long to wait before the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

_ABORT_GRACE = 2.0  # seconds to dump stacks after SIGABRT


class Backoff:
    """Exponential delays: `first`, doubled per crash, at most `cap`; a run of `stable` resets."""

    def __init__(self, *, first: float, cap: float, stable: float) -> None:
        self._first = first
        self._cap = cap
        self._stable = stable
        self._next = first

    def delay_after(self, uptime: float) -> float:
        """Seconds to wait after an incarnation that was ready for `uptime` seconds."""
        if uptime >= self._stable:
            self._next = self._first
        delay = self._next
        self._next = min(self._next * 2, self._cap)
        return delay


class EngineProcess:
    """A child process in a session of its own; stdout and stderr are inherited."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> EngineProcess:
        """Start it; `OSError` when there is nothing to execute."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether it has not been seen to exit."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        return await self._process.wait()

    async def abort(self) -> None:
        """For a process that hangs: SIGABRT, on which it writes its stacks, then `kill`."""
        if self.alive:
            self._process.send_signal(signal.SIGABRT)
            await self.wait_at_most(_ABORT_GRACE)
        self.kill()

    async def wait_at_most(self, seconds: float) -> None:
        """Return when it exited or the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self.wait())), seconds)

    def kill(self) -> None:
        """SIGKILL to the whole process group, whatever is left of it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
