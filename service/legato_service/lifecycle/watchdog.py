"""Shutdown watchdog."""

from __future__ import annotations

import faulthandler
import signal

from legato_service.lifecycle.drain import LAST_WRITES

TIMEOUT = LAST_WRITES + 15.0  # seconds; shutdown normally takes far less
_STACKS_TIME = 2.0  # seconds to write them to a log that may have no reader


def arm_watchdog() -> None:
    """Exit with code 1 after `TIMEOUT`, with all stacks on stderr to name a library that blocks.

    The kernel ends a process that cannot write them.
    """
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT + _STACKS_TIME)
