"""Shutdown watchdog: dumps stacks and exits when shutdown hangs."""

from __future__ import annotations

import faulthandler

from legato_service.lifecycle.drain import LAST_WRITES

TIMEOUT = LAST_WRITES + 15.0  # seconds; a normal shutdown takes far less


def arm_watchdog() -> None:
    """Give the process `TIMEOUT` seconds to exit.

    After that, write all stacks to stderr and exit with code 1, so that the log names the library
    that blocks.
    """
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
