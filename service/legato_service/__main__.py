"""`python -m legato_service`."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence

import msgspec
import uvloop
from legato_engine.ipc import latency_policy
from legato_engine.log_sink import standard_error
from rich.console import Console

from legato_service import arguments, lifecycle, logs
from legato_service.console import Announcer, LogAnnouncer, TerminalAnnouncer
from legato_service.engines.devices import make_engines
from legato_service.process import start


def main(argv: Sequence[str] | None = None) -> int:
    standard_error()
    console = Console(stderr=True)
    config = arguments.parse(argv)
    engine = msgspec.structs.replace(  # logs as the service does, to the same file
        config.engine, log_level=config.log_level, human_readable_logs=console.is_terminal
    )
    config = msgspec.structs.replace(config, engine=engine)
    faulthandler.enable()  # SIGABRT writes the stacks
    logs.configure(config.log_level, terminal=console.is_terminal)
    announcer: Announcer = TerminalAnnouncer(console) if console.is_terminal else LogAnnouncer()
    lifecycle.tune_process(latency_policy.resolve(config.engine.latency_policy))
    return uvloop.run(start(config, announcer, lambda: make_engines(config)))


if __name__ == "__main__":
    sys.exit(main())
