"""What a service process asks of its interpreter and of the kernel."""

from __future__ import annotations

import contextlib
import gc
import os

from legato_engine.ipc.busy_poll import cores_abound

_THRESHOLDS = (1_000, 1, 1_000)
"""When to look for garbage: containers made and not freed, then collections of younger ones.

gRPC leaves five containers of each call in a cycle, at the call's beginning; this server leaves
none. So garbage is young, and a collection costs by what it frees and by what else is young: small
ones hold up the event loop for less, and free what is still in the processor's caches. What has
survived two is a session's or a long stream's, over a hundred containers each, and goes with its
last reference. To look through all of it takes 0.3 s for 5,000 sessions: after two million more."""


def tune_process() -> None:
    """Ask for all of it. Call once, with all imported and before there are other threads."""
    _keep_garbage_small()
    _let_each_other_finish()


def _keep_garbage_small() -> None:
    """Never look again at what is imported by now, often at what is new, and seldom at the rest."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def _let_each_other_finish() -> None:
    """On few cores, have a thread that wakes up wait for the one that runs, unless one is free.

    Threads inherit it. A call wakes gRPC's some four times, and where all cores are busy each would
    take the event loop's: for a single event, after which the loop's work is no longer in that
    core's caches. A policy that somebody chose for this process stays, and so does the usual one
    where the kernel's owner allows no other.
    """
    if not cores_abound() and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
