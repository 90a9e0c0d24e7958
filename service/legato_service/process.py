"""The life of the first service process: start, serve, drain, leave."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack

import msgspec
import structlog
from legato_engine.client.engine_client import EngineClient, EngineState

from legato_service.config import ServiceConfig
from legato_service.lifecycle.console import Announcer
from legato_service.lifecycle.drain import LAST_WRITES
from legato_service.lifecycle.watchdog import arm_watchdog
from legato_service.server import Server
from legato_service.workers.port import reserved
from legato_service.workers.processes import WorkerProcesses

log = structlog.get_logger("legato.service")

EXIT_OK = 0
EXIT_FAILED = 1  # the address is taken, or the engine never came up
START_ATTEMPTS = 5  # engines that may die before one was ever ready
_LOOK_EVERY = 0.1  # seconds between two looks at a loading engine


class Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second to cut. Needs a running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        self.number = number
        (self.second if self.first.is_set() else self.first).set()


async def serve(
    config: ServiceConfig, announcer: Announcer, make_engine: Callable[[], EngineClient]
) -> int:
    """Serve until a signal or an operator's Drain says otherwise; the exit code.

    The engine is made within the loop.

    0 after a drain, also one whose grace ran out; 1 when serving never began; 128 plus the signal's
    number when a second signal cut the drain short.
    """
    signals = Signals()
    engine = make_engine()
    with ExitStack() as held:
        try:
            if config.processes > 1:
                listen = held.enter_context(reserved(config.listen))
                config = msgspec.structs.replace(config, listen=listen)
            followers = WorkerProcesses(
                config,
                engine,
                lambda grace: server.begin_drain(grace),  # noqa: PLW0108 - made in the next line
            )
            server = Server(config, engine, engine.blobs, peers=followers)
            port = await server.start()
        except OSError as error:
            log.error("cannot_listen", listen=config.listen, error=str(error))
            await engine.close()
            return EXIT_FAILED
        address = f"{config.listen.rpartition(':')[0]}:{port}"
        _tell_admin(server)
        obeying = asyncio.create_task(_drain_on(signals, followers, config.drain_grace))
        try:
            await engine.start()
            followers.start()
            come_up = _come_up(engine, followers, address, announcer)
            if not await _first_of(server.drain_begun(), come_up):
                return EXIT_FAILED
            announcer.close()
            return await _leave(server, followers, signals)
        finally:
            arm_watchdog()
            obeying.cancel()
            announcer.close()
            await server.stop()
            await followers.close()
            await engine.close()
            log.info("stopped")


async def _come_up(
    engine: EngineClient, followers: WorkerProcesses, address: str, announcer: Announcer
) -> bool:
    """Announce the start, then never return; False when the engine or a process is given up."""
    while not (engine.state is EngineState.READY and followers.ready):
        if engine.unservable:  # the engine has said why
            return False
        if engine.restarts >= START_ATTEMPTS:
            log.error("engine_never_ready", attempts=START_ATTEMPTS)
            return False
        if followers.failed_starts >= START_ATTEMPTS:
            log.error("process_never_ready", attempts=START_ATTEMPTS)
            return False
        announcer.loading(engine.progress)
        await asyncio.sleep(_LOOK_EVERY)
    if engine.model is not None:
        announcer.ready(address, engine.model)
    return await asyncio.Event().wait()


def _tell_admin(server: Server) -> None:
    if not server.admin_address:
        log.warning("admin_off", reason="other machines reach --listen; name an --admin-listen")
    else:
        log.info("admin", address=server.admin_address)


async def _drain_on(signals: Signals, followers: WorkerProcesses, grace: float) -> None:
    """The first signal begins to drain; where an operator's Drain did, it shortens the grace."""
    await signals.first.wait()
    followers.drain(grace)


async def _leave(server: Server, followers: WorkerProcesses, signals: Signals) -> int:
    """Drain, and be the last to go: the other processes need the engine until their end."""
    await _first_of(signals.second.wait(), _all_left(server, followers))
    if signals.second.is_set():
        log.warning("cut", in_flight=server.num_in_flight)
        return 128 + signals.number
    if server.num_in_flight:
        log.warning("grace_over", in_flight=server.num_in_flight)
    return EXIT_OK


async def _all_left(server: Server, followers: WorkerProcesses) -> bool:
    """Until all have; the others keep the grace themselves, and a little for their last writes."""
    in_time = await server.drained()
    while server.grace_left and not await followers.left(within=_LOOK_EVERY):
        pass  # the grace may be shortened meanwhile
    return await followers.left(within=LAST_WRITES) and in_time


async def _first_of(one: Coroutine[None, None, bool], other: Coroutine[None, None, bool]) -> bool:
    """The result of whichever ends first; the other is cancelled."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return next(task.result() for task in tasks if task in done)
