"""Child processes: start, end and restart delays, and the child's binding to its parent."""

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
"""Exit code of an engine whose configuration cannot be served; a restart would not help."""

_ABORT_GRACE = 2.0  # seconds to dump stacks after SIGABRT


class Backoff:
    """Exponential delays: `first`, doubled per crash, at most `cap`; a run of `stable` resets."""

    def __init__(self, *, first: float, cap: float, stable: float) -> None:
        self._first = first
        self._cap = cap
        self._stable = stable
        self._next = first

    def delay_after(self, uptime: float) -> float:
        """Seconds to wait before restarting a process that was ready for `uptime` seconds."""
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
        """Whether its exit has not been seen yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the exit; return the exit code, negative for a signal."""
        return await self._process.wait()

    async def abort(self) -> None:
        """End a process that hangs: SIGABRT makes it write its stacks, then `kill`."""
        if self.alive:
            self._process.send_signal(signal.SIGABRT)
            await self.wait_at_most(_ABORT_GRACE)
        self.kill()

    async def wait_at_most(self, seconds: float) -> None:
        """Wait for the exit, for `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self.wait())), seconds)

    def kill(self) -> None:
        """Send SIGKILL to what is left of the process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def bind_to_parent(parent: int) -> None:
    """In a child, first of all: ignore stop signals, and die with the parent.

    A terminal or a service manager signals all processes; only the parent acts on that.
    """
    faulthandler.enable()  # SIGABRT writes the stacks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before `prctl`
        os._exit(1)
