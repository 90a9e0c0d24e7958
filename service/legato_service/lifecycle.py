"""Lifecycle of a service process: drain, watchdog, signals, memory, orphans."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from legato_engine.client.connection import EngineConnection
from legato_engine.errors import Draining, EngineUnavailable
from legato_engine.ipc.latency_policy import SERVICE_GC, LatencyPolicy
from legato_engine.types import RequestKey

from legato_service.requests.registry import RequestRegistry
from legato_service.session.session import SessionRegistry

if TYPE_CHECKING:
    from legato_service.metrics.snapshot import Snapshot

_END_TIME = 0.5  # seconds in which open requests are notified of the end
LAST_WRITES = 5.0
"""Seconds for finished responses to be sent after the grace of a drain."""
CUT_WRITES = 1.0
"""Seconds for the statuses of requests that a drain has cut."""


class Drain:
    """A drain of requests and sessions. Belongs to one event loop."""

    def __init__(self, requests: RequestRegistry, sessions: SessionRegistry) -> None:
        self._requests = requests
        self._sessions = sessions
        self._end = math.inf  # in seconds of the loop's clock
        self._timeout: asyncio.Timeout | None = None  # timeout of the running `wait`
        self.begun = asyncio.Event()

    @property
    def time_left(self) -> float:
        """Seconds; infinite before the grace begins."""
        return max(self._end - asyncio.get_running_loop().time(), 0.0)

    def begin(self, grace: float) -> None:
        """Refuse new requests and give open ones `grace` seconds; repeated, only shorten that."""
        self._end = min(self._end, asyncio.get_running_loop().time() + grace)
        self._requests.close()
        self._sessions.go_away(self.time_left, Draining("the server is shutting down"))
        self.begun.set()
        if self._timeout is not None:
            self._timeout.reschedule(self._end)

    async def cut(self) -> None:
        """End open work with `Draining`; return when all has ended, or after `_END_TIME`."""
        error = Draining("the server is shutting down")
        self._sessions.go_away(0, error)
        self._requests.fail_all(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIME):
                await self._requests.wait_empty()
                await self._sessions.wait_empty()
        self._sessions.fail_all(error)  # sessions whose clients read no results

    async def wait(self) -> bool:
        """Wait for all to end, within the grace; return whether they did. One waiter only."""
        await self.begun.wait()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._end) as self._timeout:
                    await self._sessions.wait_empty()
                    await self._requests.wait_empty()
        finally:
            self._timeout = None
        return len(self._requests) + len(self._sessions) == 0


# ---------------------------------------------------------------- watchdog

TIMEOUT = LAST_WRITES + 15.0  # seconds; shutdown normally takes far less
_STACKS_TIME = 2.0  # seconds to write them to a log that may have no reader


def arm_watchdog() -> None:
    """Exit with code 1 after `TIMEOUT`, with all stacks on stderr to name a library that blocks.

    The kernel ends a process that cannot write them.
    """
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT + _STACKS_TIME)


# ---------------------------------------------------------------- signals


class Signals:
    """SIGTERM and SIGINT, one after the other. Needs a running loop."""

    def __init__(self) -> None:
        self._received = asyncio.Semaphore(0)
        self.number = 0  # the last signal
        self.cut = asyncio.Event()  # set by the signal that ends the drain
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.number = number
        self._received.release()

    async def next(self) -> bool:
        """Wait for the first one that no call has returned for; one waiter at a time."""
        return await self._received.acquire()


# ---------------------------------------------------------------- tuning


def tune_process(policy: LatencyPolicy) -> None:
    """Call after imports and before other threads."""
    gc.freeze()  # imported modules stay; collections skip them
    gc.set_threshold(*SERVICE_GC)
    _schedule(policy.service_scheduler)


def _schedule(scheduler: int) -> None:
    """Set the scheduling policy of this thread and the threads it starts.

    A policy set from outside stays, and so does the usual one where the kernel permits no other.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER != scheduler:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, scheduler, os.sched_param(0))


# ---------------------------------------------------------------- orphans

# Orphans become zombies of this process if it is the first one of a container.

_PR_GET_CHILD_SUBREAPER = 37
_TASKS = Path("/proc/self/task")


def inherits_orphans() -> bool:
    """Return whether the kernel reparents orphans to this process."""
    if os.getpid() == 1:
        return True
    answer = ctypes.c_int(0)
    failed = ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return not failed and bool(answer.value)


async def reap_orphans(interval: float = 1.0) -> None:
    """Reap zombies that nothing else waits for, every `interval` seconds; never return.

    The event loop reaps its own children as soon as they end, and it runs between two polls. A
    process still defunct after two polls is therefore not ours.
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


# ---------------------------------------------------------------- peers

_TIMEOUT = 2.0  # seconds for the engine to reply; it stops the requests also later


class Peers(Protocol):
    """The other processes, as one process knows them."""

    @property
    def number(self) -> int:
        """0 for the process that runs the engines and the workers."""

    def drain(self, grace: float) -> None:
        """Drain all processes, this one included, within `grace` seconds."""

    async def abort(self, target: RequestKey | None) -> int:
        """Stop the others' requests that match `target`, or all; return how many."""

    async def gather(self, own: Snapshot) -> Snapshot:
        """Add the others' metrics to this process's own."""


async def abort_elsewhere(engines: Sequence[EngineConnection], target: RequestKey | None) -> int:
    """Stop other processes' requests through the engines; return how many."""
    return sum(await asyncio.gather(*(_abort_at(each, target) for each in engines)))


async def _abort_at(engine: EngineConnection, target: RequestKey | None) -> int:
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await engine.stop_elsewhere(target)
    except (EngineUnavailable, TimeoutError):
        return 0
