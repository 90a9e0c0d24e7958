"""Latency policy of a process: busy polling and scheduling class.

A core that slept for milliseconds has lost most of its next task's data from its caches. Polling
costs a core, so it is brief.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import time
from collections.abc import Sequence

import msgspec

from legato_engine.config import LATENCY_POLICIES
from legato_engine.errors import InvalidField

EXPECTED_REQUEST = 0.002
"""Seconds to poll for a lone request that is announced, or may follow the last result."""

SHORT_REQUEST = 0.025
"""Seconds to poll for the end of a lone request."""


class BusyPoll:
    """Busy polling: keeps the running event loop from sleeping."""

    def __init__(self) -> None:
        self._until = 0.0  # monotonic seconds
        self.active = False
        """Whether the loop is kept from sleeping."""

    def extend(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        if not self.active:
            self.active = True
            asyncio.get_running_loop().call_soon(self._poll)

    def end(self) -> None:
        self._until = 0.0

    def _poll(self) -> None:
        """Poll without blocking: while a callback is due, the loop's selector does not sleep."""
        self.active = time.monotonic() < self._until
        if self.active:
            asyncio.get_running_loop().call_soon(self._poll)


# ---------------------------------------------------------------- latency policy

SERVICE_GC = (1_000, 1, 1_000)
"""Garbage collection thresholds of a service process.

gRPC leaves five containers of each call in a cycle when the call begins; this server leaves none.
So garbage is young, and frequent collections are short and find it in the caches. Objects that
survive two collections belong to sessions or long streams, over a hundred containers each, and are
freed with their last reference. A full collection takes 0.3 s for 5,000 sessions; it runs after two
million more containers.
"""

ENGINE_GC = 50_000
"""Garbage collection threshold of the engine process, in containers made and not freed.

Requests and steps create no cycles, so that collections are only for what libraries leave.
"""

_MANY_CORES = 8  # with this many cores, one may be spent on polling


class LatencyPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Latency settings of a server's processes."""

    busy_poll: bool
    """Poll for a moment instead of sleeping while a request is expected or short."""

    send_at_once: bool
    """Send a request whose progress is not read to the engine at once, not with the loop's turn."""

    poller_reads: bool
    """Let the thread that waits for gRPC's events read its connections, too.

    Otherwise gRPC's own threads read them and wake that thread: one more switch between a message
    and its handler, which delays a lone call. On few cores those threads read while handlers run,
    which serves more calls a second.
    """

    service_scheduler: int
    """Kernel scheduling policy of the service's threads.

    With SCHED_BATCH, a thread that wakes up takes a free core or waits for its turn, but preempts
    no other. A call wakes gRPC's threads some four times; on few cores each would preempt the event
    loop for a single event and evict its data from that core's caches.
    """


LOW_LATENCY = LatencyPolicy(
    busy_poll=True, send_at_once=True, poller_reads=True, service_scheduler=os.SCHED_OTHER
)
SHARED = LatencyPolicy(
    busy_poll=False, send_at_once=False, poller_reads=False, service_scheduler=os.SCHED_BATCH
)


@functools.cache
def resolve(setting: str) -> LatencyPolicy:
    """Return the policy of a setting; `auto` counts cores.

    Raises:
        InvalidField: `setting` is not one of `LATENCY_POLICIES`.
    """
    if setting not in LATENCY_POLICIES:
        raise InvalidField(f"unknown latency_policy {setting!r}", field="latency_policy")
    if setting == "auto":
        has_spare_cores = len(os.sched_getaffinity(0)) >= _MANY_CORES
        return LOW_LATENCY if has_spare_cores else SHARED
    return LOW_LATENCY if setting == "low-latency" else SHARED


def setting_in(arguments: Sequence[str]) -> str:
    """Find `--latency-policy` in a command line that is not parsed yet.

    `auto` when it is malformed: the parser of all options reports that.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--latency-policy", nargs="?")
    given = parser.parse_known_args(arguments)[0].latency_policy
    return given if given in LATENCY_POLICIES else "auto"


def reset_batch_scheduling() -> None:
    """Reset SCHED_BATCH, which a process and its threads inherit from its service."""
    for thread in map(int, os.listdir("/proc/self/task")):  # importing numpy starts some
        if os.sched_getscheduler(thread) == os.SCHED_BATCH:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
