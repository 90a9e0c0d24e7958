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
from legato_engine.client.recovery import RefusedRequests
from legato_engine.errors import Draining
from legato_engine.ipc import latency_policy
from legato_engine.ipc.latency_policy import LatencyPolicy
from legato_engine.log_sink import standard_error
from legato_engine.parent_process import bind_to_parent
from legato_engine.types import RequestKey

from legato_service import lifecycle, logs
from legato_service.access.credentials import FileRejected
from legato_service.config import ServiceConfig
from legato_service.engines.group import EngineGroup
from legato_service.lifecycle import abort_elsewhere, arm_watchdog
from legato_service.metrics.snapshot import Snapshot
from legato_service.server import Server
from legato_service.workers.control_channel import (
    Collect,
    Collected,
    ControlChannel,
    DrainCommand,
    MetricsExchange,
    Serving,
    WithdrawCommand,
)

log = structlog.get_logger("legato.service")


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An engine listens at `folder`; blobs for it are written in `namespace`."""

    folder: str
    namespace: str
    device: str


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings from the first process; `config.listen` has the real port.

    `number` is 1 or more.
    """

    config: ServiceConfig
    number: int
    engines: tuple[EngineEndpoint, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; the exit code is 0 only after a drain."""
    standard_error()
    arguments = _parse(argv)
    bind_to_parent(arguments.parent)
    settings = msgspec.json.decode(arguments.settings, type=WorkerSettings)
    logs.configure(settings.config.log_level, terminal=sys.stderr.isatty())
    policy = latency_policy.resolve(settings.config.engine.latency_policy)
    lifecycle.tune_process(policy)
    return uvloop.run(serve(settings, policy, socket.socket(fileno=arguments.channel)))


class _FirstProcess:
    """The `Peers` of a worker."""

    def __init__(
        self, number: int, channel: ControlChannel, engines: Sequence[EngineConnection]
    ) -> None:
        self.number = number
        self._channel = channel
        self._engines = engines
        self.exchange: MetricsExchange | None = None

    def drain(self, grace: float) -> None:
        self._channel.send(DrainCommand(grace=grace))

    async def abort(self, target: RequestKey | None) -> int:
        return await abort_elsewhere(self._engines, target)

    async def gather(self, own: Snapshot) -> Snapshot:
        """Gather metrics; the first process asks this one in turn."""
        everything = None if self.exchange is None else await self.exchange.request()
        return own if everything is None else everything


async def serve(settings: WorkerSettings, policy: LatencyPolicy, connection: socket.socket) -> int:
    """Serve until the first process orders a drain or is gone."""
    channel = await ControlChannel.from_socket(connection)
    refused = RefusedRequests()
    engines = [
        EngineConnection(
            each.namespace,
            policy,
            settings.number,
            number=number,
            device=each.device,
            refused=refused,
        )
        for number, each in enumerate(settings.engines)
    ]
    group = EngineGroup(engines, affinity=settings.config.affinity, has_peers=True)
    first = _FirstProcess(settings.number, channel, engines)
    try:
        server = Server(settings.config, group, peers=first)
    except FileRejected as error:  # the files of credentials changed since the first process began
        log.error("configuration_rejected", number=settings.number, reason=str(error))
        await _close(engines)
        channel.close()
        return 1
    first.exchange = MetricsExchange(channel, server.snapshot)
    listening = asyncio.create_task(_listen(channel, server, first.exchange))
    drained = asyncio.create_task(server.shutdown.wait())
    announcing: asyncio.Task[None] | None = None
    try:
        for engine, endpoint in zip(engines, settings.engines, strict=True):
            engine.connect(endpoint.folder)
        await server.start()
        announcing = asyncio.create_task(_announce_serving(group, channel))
        await asyncio.wait((listening, drained), return_when=asyncio.FIRST_COMPLETED)
        return 0 if drained.done() else 1
    except OSError as error:
        log.error("worker_failed", number=settings.number, error=str(error))
        return 1
    finally:
        arm_watchdog()
        for task in (announcing, listening, drained):
            if task is not None:
                task.cancel()
        await server.stop()
        await _close(engines)
        channel.close()


async def _close(engines: Sequence[EngineConnection]) -> None:
    for each in engines:
        await each.close()


async def _announce_serving(engines: EngineGroup, channel: ControlChannel) -> None:
    with suppress(Draining):
        await engines.wait_ready()
        log.info("worker_ready", pid=os.getpid())
        channel.send(Serving())


async def _listen(channel: ControlChannel, server: Server, exchange: MetricsExchange) -> None:
    while (message := await channel.receive()) is not None:
        match message:
            case DrainCommand(grace=grace):
                server.begin_drain(grace)
            case WithdrawCommand():
                server.health.withdraw()
            case Collect() | Collected():
                exchange.receive(message)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_service.workers.worker", description=__doc__)
    parser.add_argument("--settings", required=True, help="Settings as JSON")
    parser.add_argument("--channel", required=True, type=int, help="inherited socket")
    parser.add_argument("--latency-policy", help="for `legato_service`, when it is imported")
    parser.add_argument(
        "--parent", required=True, type=int, help="process id of the first service process"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
