"""`python -m legato_service` whose engine is restarted at once, however often it dies.

A frame or a call may take minutes, so that deadlines tell nothing about the machine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import msgspec
from legato_engine.client.engine_client import EngineLimits
from legato_service import __main__ as service
from legato_service import arguments
from legato_service.config import ServiceConfig
from legato_service.engines.devices import make_engines

LIMITS = EngineLimits(backoff_first=0.05, backoff_cap=0.05)
PATIENCE = 600.0  # seconds

_parse = arguments.parse


def parse(argv: Sequence[str] | None = None) -> ServiceConfig:
    """The configuration of the command line with patient deadlines."""
    return msgspec.structs.replace(_parse(argv), unary_deadline=PATIENCE)


if __name__ == "__main__":
    vars(arguments)["parse"] = parse
    vars(service)["make_engines"] = functools.partial(make_engines, limits=LIMITS)
    sys.exit(service.main())
