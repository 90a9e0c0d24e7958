"""`python -m legato_service`: read the command line, serve, leave with an exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import uvloop
from legato_engine.client import EngineClient
from rich.console import Console

from legato_service import arguments, logs
from legato_service.console import Announcer, LogAnnouncer, TerminalAnnouncer
from legato_service.life import serve

_GC_THRESHOLD = 10_000  # containers made and not freed: few of an RPC's outlive it, none in cycles


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code, see `life.serve`."""
    config = arguments.parse(argv)
    console = Console(stderr=True)
    logs.configure(config.log_level, terminal=console.is_terminal)
    announcer: Announcer = TerminalAnnouncer(console) if console.is_terminal else LogAnnouncer()
    gc.freeze()  # what is imported stays: no collection need look at it again
    gc.set_threshold(_GC_THRESHOLD)
    return uvloop.run(serve(config, announcer, lambda: EngineClient(config.engine)))


if __name__ == "__main__":
    sys.exit(main())
