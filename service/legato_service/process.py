"""The first service process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress

import msgspec
import structlog
from legato_engine.client.engine_client import EXIT_UNSERVABLE, EngineClient
from legato_engine.client.monitor import EngineState
from legato_engine.errors import InvalidField

from legato_service import addresses
from legato_service.access.credentials import FileRejected
from legato_service.config import ServiceConfig
from legato_service.console import Announcer
from legato_service.engines.group import EngineGroup
from legato_service.lifecycle import (
    LAST_WRITES,
    Signals,
    arm_watchdog,
    inherits_orphans,
    reap_orphans,
)
from legato_service.listeners import Listeners
from legato_service.server import Server
from legato_service.workers.processes import WorkerProcesses, reserved

log = structlog.get_logger("legato.service")

EXIT_OK = 0
EXIT_FAILED = 1  # the address is in use, or the engine never got ready
"""Exit codes; `EXIT_UNSERVABLE` when no restart would help."""
START_ATTEMPTS = 5  # engines, or workers of one number, that may die before one gets ready
_POLL_INTERVAL = 0.1  # seconds
_CUT_TIME = 3.0  # seconds for workers to end their calls after a second signal


async def serve(
    config: ServiceConfig,
    announcer: Announcer,
    engines: Sequence[EngineClient],
    signals: Signals,
) -> int:
    """Serve with engines that were started until a signal or an operator's Drain.

    Return the exit code: 0 after a drain, also when its grace ran out; 1 when serving never began,
    78 when it never can with this configuration; 128 plus the number of a signal that ends the
    drain.
    """
    with ExitStack() as stack:
        try:
            if config.processes > 1:
                listen = stack.enter_context(reserved(config.listen))
                config = msgspec.structs.replace(config, listen=listen)
            workers = WorkerProcesses(
                config,
                engines,
                lambda grace: server.begin_drain(grace),  # noqa: PLW0108 - made in the next line
                lambda: server.metrics.snapshot(),  # noqa: PLW0108 - the same
            )
            has_peers = config.processes > 1
            group = EngineGroup(engines, affinity=config.affinity, has_peers=has_peers)
            server = Server(config, group, peers=workers)
            port = await server.start()
        except OSError as error:
            log.error("listen_failed", listen=config.listen, error=str(error))
            await _close(engines)
            return EXIT_FAILED
        except FileRejected as error:
            log.error("configuration_rejected", reason=str(error))
            await _close(engines)
            return EXIT_FAILED
        address = f"{config.listen.rpartition(':')[0]}:{port}"
        _log_listeners(config, address, server.listeners)
        if server.metrics_address:
            log.info("metrics_listening", address=server.metrics_address)
        draining = asyncio.create_task(_drain_on(signals, server, workers, config))
        reaping = asyncio.create_task(reap_orphans()) if inherits_orphans() else None
        try:
            workers.start()
            start_up = _start_up(engines, workers, address, announcer)
            if not await _first_of(server.shutdown.begun.wait(), start_up):
                unservable = any(each.unservable for each in engines)
                return EXIT_UNSERVABLE if unservable else EXIT_FAILED
            announcer.close()
            return await _finish_drain(server, workers, signals)
        finally:
            arm_watchdog()
            draining.cancel()
            if reaping is not None:
                reaping.cancel()
            announcer.close()
            await server.stop()
            await workers.close()
            await _close(engines)
            log.info("stopped")


async def _close(engines: Sequence[EngineClient]) -> None:
    await asyncio.gather(*(each.close() for each in engines))


async def _start_up(
    engines: Sequence[EngineClient], workers: WorkerProcesses, address: str, announcer: Announcer
) -> bool:
    """Announce the start of all, then never return; False when that fails.

    Calls are answered as soon as one engine is ready.
    """
    while True:
        late = [each for each in engines if each.state is not EngineState.READY]
        if not late and workers.is_ready:
            break
        if any(each.unservable for each in engines):  # the engine has logged the reason
            return False
        for each in late:
            if each.restarts >= START_ATTEMPTS:
                log.error("engine_never_ready", engine=each.number, attempts=START_ATTEMPTS)
                return False
        if workers.failed_starts >= START_ATTEMPTS:
            log.error("worker_never_ready", attempts=START_ATTEMPTS)
            return False
        if all(each.state is not EngineState.LOST for each in late):  # else it may not start again
            slowest = min((each.progress for each in engines), key=lambda each: each.fraction)
            announcer.loading(slowest)
        await asyncio.sleep(_POLL_INTERVAL)
    announcer.ready(address, [each.model for each in engines if each.model is not None])
    return await asyncio.Event().wait()


def _log_listeners(config: ServiceConfig, address: str, listeners: Listeners) -> None:
    if not listeners.admin_address:
        log.warning("admin_disabled", reason=listeners.admin_problem)
    else:
        log.info("admin_listening", address=listeners.admin_address)
    if listeners.health_address:
        log.info("health_listening", address=listeners.health_address)
    for each in (address, listeners.admin_address):
        if not each or addresses.is_local(each):
            continue
        if not config.has_credentials:
            log.warning("unauthenticated_listener", address=each)
        if not config.tls_cert:
            log.warning("unencrypted_listener", address=each)


async def _drain_on(
    signals: Signals, server: Server, workers: WorkerProcesses, config: ServiceConfig
) -> None:
    """Drain after a signal and the delay, which the next signal skips; then wait for `cut`."""
    await signals.next()
    if config.drain_delay and server.health.is_ready:
        server.health.withdraw()
        workers.withdraw()
        log.info("drain_delayed", seconds=config.drain_delay)
        with suppress(TimeoutError):
            async with asyncio.timeout(config.drain_delay):
                await _first_of(signals.next(), server.shutdown.begun.wait())
    workers.drain(config.drain_grace)
    await signals.next()
    signals.cut.set()


async def _finish_drain(server: Server, workers: WorkerProcesses, signals: Signals) -> int:
    """Finish draining; this process exits last, because the workers need the engine."""
    await _first_of(signals.cut.wait(), _all_drained(server, workers))
    if signals.cut.is_set():
        log.warning("drain_cut", in_flight=len(server.requests))
        workers.drain(0.0)
        await asyncio.gather(server.stop(), workers.wait_exited(within=_CUT_TIME))
        return 128 + signals.number
    if len(server.requests):
        log.warning("drain_grace_expired", in_flight=len(server.requests))
    return EXIT_OK


async def _all_drained(server: Server, workers: WorkerProcesses) -> bool:
    """Wait until all have drained; workers keep the grace themselves, and `LAST_WRITES` more."""
    in_time = await server.shutdown.wait()
    while server.shutdown.time_left and not await workers.wait_exited(within=_POLL_INTERVAL):
        pass  # the grace may have been shortened
    return await workers.wait_exited(within=LAST_WRITES) and in_time


async def _first_of(one: Coroutine[None, None, bool], other: Coroutine[None, None, bool]) -> bool:
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return next(task.result() for task in tasks if task in done)


# ---------------------------------------------------------------- start


async def start(
    config: ServiceConfig, announcer: Announcer, make_engines: Callable[[], Sequence[EngineClient]]
) -> int:
    """Start the engines, and serve while they load; return the exit code, as `serve`.

    `make_engines` runs within the loop.
    """
    signals = Signals()
    try:
        engines = make_engines()
    except InvalidField as error:
        log.error("configuration_rejected", reason=str(error), **error.metadata)
        return EXIT_UNSERVABLE
    for each in engines:
        await each.start()
    return await serve(config, announcer, engines, signals)
