"""The start of the first service process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import structlog
from legato_engine.client.engine_client import EngineClient
from legato_engine.client.supervisor import EXIT_UNSERVABLE
from legato_engine.errors import InvalidField

from legato_service.config import ServiceConfig
from legato_service.lifecycle.console import Announcer
from legato_service.lifecycle.signals import Signals

log = structlog.get_logger("legato.service")


async def start(
    config: ServiceConfig, announcer: Announcer, make_engines: Callable[[], Sequence[EngineClient]]
) -> int:
    """Start the engines, which load while this process imports gRPC; then serve.

    `make_engines` runs within the loop. Return the exit code, as `process.serve`.
    """
    signals = Signals()
    try:
        engines = make_engines()
    except InvalidField as error:
        log.error("configuration_rejected", reason=str(error), **error.metadata)
        return EXIT_UNSERVABLE
    for each in engines:
        await each.start()
    await asyncio.sleep(0)  # so that their processes begin before the imports
    from legato_service.process import serve  # takes half a second

    gc.freeze()  # these modules stay, too
    return await serve(config, announcer, engines, signals)
