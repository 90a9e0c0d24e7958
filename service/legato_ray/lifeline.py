"""`legato serve` for as long as its standard input is open: python -m legato_ray.lifeline OPTIONS.

A replica holds the other end. When Ray kills the replica, the server drains and leaves by itself.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _drain_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """SIGTERM is the default's own, which ends the process, until the server handles it."""
    threading.Thread(target=_drain_at_end_of_input, name="lifeline", daemon=True).start()
    sys.argv[0] = "legato serve"
    runpy.run_module("legato_service", run_name="__main__")


if __name__ == "__main__":
    main()
