"""The service process with the fake engine process: `python -m tests.service.fake_service`.

All of `legato_service.__main__` but the engine's command; the first argument names its module.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence

import uvloop
from legato_engine.client.engine_client import EngineClient, EngineLimits
from legato_service import arguments, logs
from legato_service.console import LogAnnouncer
from legato_service.engines.devices import make_engines
from legato_service.process import start


def main() -> int:
    """Serve with the engine of the module that the first argument names."""
    module, *rest = sys.argv[1:]
    config = arguments.parse(rest)
    faulthandler.enable()
    logs.configure(config.log_level, terminal=False)
    command = (sys.executable, "-m", module)
    limits = EngineLimits(backoff_first=0.01, backoff_cap=0.02)

    def engines() -> Sequence[EngineClient]:
        return make_engines(config, command=command, limits=limits)

    return uvloop.run(start(config, LogAnnouncer(), engines))


if __name__ == "__main__":
    sys.exit(main())
