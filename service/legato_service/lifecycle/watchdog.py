"""Shutdown watchdog."""

from __future__ import annotations

import faulthandler

from legato_service.lifecycle.drain import LAST_WRITES

TIMEOUT = LAST_WRITES + 15.0  # seconds; shutdown normally takes far less


def arm_watchdog() -> None:
    """Exit with code 1 after `TIMEOUT`, with all stacks on stderr to name a library that blocks."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
