"""A worker process of the service: `python -m legato_service.workers.worker`."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import structlog
import uvloop
from legato_engine.client.connection import EngineConnection
from legato_engine.client.supervisor import bind_to_parent
from legato_engine.core import RequestKey
from legato_engine.errors import Draining
from legato_engine.ipc import latency_policy
from legato_engine.ipc.latency_policy import LatencyPolicy

from legato_service.config import ServiceConfig
from legato_service.lifecycle import tuning
from legato_service.lifecycle.peers import abort_elsewhere
from legato_service.lifecycle.watchdog import arm_watchdog
from legato_service.logs import configuration
from legato_service.server import Server
from legato_service.workers.control_channel import Leave, Line, Serving

log = structlog.get_logger("legato.service")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the first process tells; `number` is 1 or more, `config.listen` has the real port.

    Pictures are written in `namespace`, and the engine is reached at `endpoint`.
    """

    config: ServiceConfig
    number: int
    endpoint: str
    namespace: str


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to leave; the exit code is 0 only then."""
    arguments = _parse(argv)
    bind_to_parent(arguments.parent)
    settings = msgspec.json.decode(arguments.settings, type=Settings)
    configuration.configure(settings.config.log_level, terminal=sys.stderr.isatty())
    policy = latency_policy.resolve(settings.config.engine.latency_policy)
    tuning.tune_process(policy)
    return uvloop.run(follow(settings, policy, socket.socket(fileno=arguments.line)))


class _First:
    """The peers: the first process, at the other end of the line, passes orders on to all."""

    is_first = False

    def __init__(self, line: Line, engine: EngineConnection) -> None:
        self._line = line
        self._engine = engine

    def drain(self, grace: float) -> None:
        """Leaves it to the first, which orders it of all."""
        self._line.send(Leave(grace=grace))

    async def abort(self, target: RequestKey | None) -> int:
        """By way of the engine."""
        return await abort_elsewhere(self._engine, target)


async def follow(settings: Settings, policy: LatencyPolicy, connection: socket.socket) -> int:
    """Serve until the line to the first process says otherwise, or ends."""
    line = await Line.over(connection)
    engine = EngineConnection(settings.namespace, policy, settings.number)
    server = Server(settings.config, engine, engine.blobs, peers=_First(line, engine))
    obeying = asyncio.create_task(_obey(line, server))
    draining = asyncio.create_task(server.drained())
    telling: asyncio.Task[None] | None = None
    try:
        engine.connect(settings.endpoint)
        await server.start()
        telling = asyncio.create_task(_tell_when_serving(engine, line))
        await asyncio.wait((obeying, draining), return_when=asyncio.FIRST_COMPLETED)
        return 0 if draining.done() else 1
    except OSError as error:
        log.error("cannot_follow", number=settings.number, error=str(error))
        return 1
    finally:
        arm_watchdog()
        for task in (telling, obeying, draining):
            if task is not None:
                task.cancel()
        await server.stop()
        await engine.close()
        line.close()


async def _tell_when_serving(engine: EngineConnection, line: Line) -> None:
    with suppress(Draining):
        await engine.wait_ready()
        log.info("process_ready", pid=os.getpid())
        line.send(Serving())


async def _obey(line: Line, server: Server) -> None:
    """Until the first process is gone."""
    while (note := await line.receive()) is not None:
        if isinstance(note, Leave):
            server.begin_drain(note.grace)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_service.workers.worker", description=__doc__)
    parser.add_argument("--settings", required=True, help="Settings as JSON")
    parser.add_argument("--line", required=True, type=int, help="inherited socket")
    parser.add_argument("--latency-policy", help="for `legato_service`, when it is imported")
    parser.add_argument("--parent", required=True, type=int, help="process id of the first")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
