"""The engine processes of a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from legato_engine.client.engine_client import EngineClient, EngineLimits
from legato_engine.client.files import require_files
from legato_engine.client.refused_requests import RefusedRequests

from legato_service.config import ServiceConfig
from legato_service.engines.devices import engine_configs, parse_devices

_COMMAND = (sys.executable, "-m", "legato_engine.engine.process")


def make_engines(
    config: ServiceConfig,
    *,
    command: Sequence[str] = _COMMAND,
    limits: EngineLimits | None = None,
) -> tuple[EngineClient, ...]:
    """Return a client for each device, which starts `command` there. Needs a running event loop.

    Raises:
        InvalidField: a device is unknown, a file is missing, or the temporary folder takes no
            sockets.
    """
    require_files(config.engine)
    devices = parse_devices(config.devices) if config.devices else ()
    refused = RefusedRequests()
    return tuple(
        EngineClient(each, limits=limits, command=command, number=number, refused=refused)
        for number, each in enumerate(engine_configs(config.engine, devices))
    )
