"""What happens to a process that does not get away."""

from __future__ import annotations

import faulthandler

from legato_service.lifecycle.drain import LAST_WRITES

PATIENCE = LAST_WRITES + 15.0  # seconds: stopping is bounded by far less, and so is an engine's end


def arm_watchdog() -> None:
    """From now on the process has `PATIENCE` seconds to end by itself.

    Else its stacks go to stderr and it ends with exit code 1: an orchestrator must not have to
    find out which library did not let go.
    """
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
