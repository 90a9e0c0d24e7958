"""A machine that stalls processes (`make test-stalled`), to find waits that need a quick one.

A pytest plugin (`-p tests.stalls`). A thread of each process of tests, services and engines holds
the interpreter's lock now and then, so that the process stands still wherever it is, and callbacks
of asyncio's loops are late, most of all the first ones of a test. The moments cannot be repeated: a
file is run several times.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import threading
import time
from typing import Any

_VARIABLE = "LEGATO_TEST_STALLS"
"""Set in the environment of all processes that are to stall."""

_OFTEN = 0.15
"""The share of a test's first callbacks that are late."""

_FIRST = 300
"""Callbacks, after which the share falls as the reciprocal of their number."""

_run = asyncio.Handle._run
_policy_of, _set_policy = os.sched_getscheduler, os.sched_setscheduler  # tests replace them


class _Stalls:
    """The stalls of this process."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._callbacks = 0
        handle: Any = asyncio.Handle
        handle._run = lambda each: self._run_late(each)  # noqa: PLW0108 - given the handle
        threading.Thread(target=self._hold, daemon=True, name="stalls").start()

    def begin_test(self) -> None:
        self._callbacks = 0

    def _run_late(self, handle: asyncio.Handle) -> None:
        self._callbacks += 1
        if self._random.random() < _OFTEN * min(1.0, _FIRST / self._callbacks):
            time.sleep(self._random.choice((0.002, 0.005, 0.03)))
        _run(handle)

    def _hold(self) -> None:
        """Stand still a fifth of the time."""
        sleep_with_lock = ctypes.PyDLL(None).usleep
        while True:
            policy = _policy_of(os.getpid())  # the main thread's, which it may change
            _set_policy(threading.get_native_id(), policy, os.sched_param(0))
            time.sleep(self._random.expovariate(1 / 0.05))
            sleep_with_lock(int(min(self._random.expovariate(1 / 0.012), 0.1) * 1e6))


_stalls: _Stalls | None = None


def begin() -> None:
    """Stall this process from now on, if the environment says so."""
    global _stalls
    if _VARIABLE in os.environ and _stalls is None:
        _stalls = _Stalls()


def pytest_configure(config: Any) -> None:
    """Processes of tests stall, not the one that starts them."""
    os.environ[_VARIABLE] = "1"
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        begin()


def pytest_runtest_setup() -> None:
    """A test's own callbacks are its first."""
    if _stalls is not None:
        _stalls.begin_test()
