"""In a forked service process: its engines and workers are forked, too."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from legato_engine.client import engine_client

from tests.fork_server.popen import FORKED, ForkServer

_spawn = engine_client.ChildProcess.spawn


class ForkedProcess:
    """What `ChildProcess` uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def fork_children_of(server: ForkServer) -> None:
    """Have `ChildProcess.spawn` fork what it can."""
    nothing = os.open(os.devnull, os.O_RDONLY)

    async def spawn(
        cls: type[engine_client.ChildProcess], command: Sequence[str], inherited: Sequence[int] = ()
    ) -> engine_client.ChildProcess:
        if list(command[:2]) != [sys.executable, "-m"] or command[2] not in FORKED:
            return await _spawn(command, inherited)
        fds = {0: nothing, 1: 1, 2: 2, **{fd: fd for fd in inherited}}
        pid = server.start(command[2], command[3:], os.environ, fds, new_session=True)
        process: Any = ForkedProcess(pid)
        return cls(process)

    vars_of: Any = engine_client.ChildProcess
    vars_of.spawn = classmethod(spawn)
