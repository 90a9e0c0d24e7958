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
from legato_service.config import ServiceConfig
from legato_service.console import Announcer, LogAnnouncer, TerminalAnnouncer
from legato_service.engines.devices import make_engines
from legato_service.process import start


def main(argv: Sequence[str] | None = None) -> int:
    standard_error()
    console = Console(stderr=True)
    config = _with_logs(arguments.parse(argv), for_people=console.is_terminal)
    faulthandler.enable()  # SIGABRT writes the stacks
    logs.configure(config.log_level, terminal=console.is_terminal)
    announcer: Announcer = TerminalAnnouncer(console) if console.is_terminal else LogAnnouncer()
    lifecycle.tune_process(latency_policy.resolve(config.engine.latency_policy))
    return uvloop.run(start(config, announcer, lambda: make_engines(config)))


def _with_logs(config: ServiceConfig, *, for_people: bool) -> ServiceConfig:
    """Let engines log as the service does, to the same file."""
    engine = msgspec.structs.replace(
        config.engine, log_level=config.log_level, human_readable_logs=for_people
    )
    return msgspec.structs.replace(config, engine=engine)


if __name__ == "__main__":
    sys.exit(main())
