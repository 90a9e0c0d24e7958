"""What a service process asks of its interpreter and of the kernel."""

from __future__ import annotations

import contextlib
import gc
import os

from legato_engine.awake import cores_abound

_THRESHOLD = 1_000
"""Containers made and not freed. gRPC leaves five of each call in a cycle, this server none.

A collection costs by what it frees, so many small ones cost what few large ones would. But they
hold up the event loop for a tenth as long, and what they free is still in the processor's caches
when the next call takes it."""


def tune_process() -> None:
    """Ask for all of it. Call once, with all imported and before there are other threads."""
    _keep_garbage_small()
    _let_each_other_finish()


def _keep_garbage_small() -> None:
    """Never look again at what is imported by now, and often at little of the rest."""
    gc.freeze()
    gc.set_threshold(_THRESHOLD)


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
