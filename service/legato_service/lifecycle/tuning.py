"""Applies the latency policy to a service process."""

from __future__ import annotations

import contextlib
import gc
import os

from legato_engine.ipc.latency_policy import LatencyPolicy


def tune_process(policy: LatencyPolicy) -> None:
    """Set garbage collection and scheduling. Call once, after imports and before other threads."""
    gc.freeze()  # imported modules stay; collections skip them
    gc.set_threshold(*policy.service_gc)
    _schedule(policy.service_scheduler)


def _schedule(scheduler: int) -> None:
    """Set the scheduling policy of this thread and of those that it will start.

    A policy that was set for this process from outside stays, and so does the usual one where the
    kernel permits no other.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER != scheduler:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, scheduler, os.sched_param(0))
