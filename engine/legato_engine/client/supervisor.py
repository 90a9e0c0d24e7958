"""A child process: its start, its end, how long to wait before the next, and its own side of it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
EXIT_UNSERVABLE = os.EX_CONFIG
"""Of an engine whose configuration cannot be served: another one would end like it."""

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


class ChildProcess:
    """A child process in a session of its own; stdout and stderr are inherited."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def spawn(cls, command: Sequence[str], inherited: Sequence[int] = ()) -> ChildProcess:
        """Start it with these descriptors; `OSError` when there is nothing to execute."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=tuple(inherited),
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


def bind_to_parent(parent: int) -> None:
    """For the child, first of all: only this parent decides when it stops, whose death is its own.

    Signals that a terminal or a service manager sends to everybody are for the parent to act upon.
    """
    faulthandler.enable()  # SIGABRT writes the stacks of a process that hangs
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
