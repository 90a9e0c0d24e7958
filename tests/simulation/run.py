"""One simulated history from a seed."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
from typing import Any
from unittest import mock

import structlog
from legato_engine.client import connection as connection_module
from legato_engine.client.connection import EngineConnection
from legato_engine.client.recovery import MAX_RESUMPTIONS
from legato_engine.errors import EngineLost
from legato_engine.ipc import latency_policy

from tests.simulation.callers import EXPECTED_ERRORS, History, Wish, call, random_request
from tests.simulation.engine_host import EngineDied, Incarnation, Shape
from tests.simulation.link import Network, SimulatedTransport
from tests.simulation.virtual_time import virtual_time

SHARED = latency_policy.resolve("shared")  # without busy polling, which never sleeps


@dataclasses.dataclass
class Totals:
    """What happened in some runs."""

    runs: int = 0
    calls: int = 0
    kills: int = 0
    virtual_seconds: float = 0.0
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def join(self, other: Totals) -> None:
        self.runs += other.runs
        self.calls += other.calls
        self.kills += other.kills
        self.virtual_seconds += other.virtual_seconds
        self.ends.update(other.ends)


class Simulation:
    """Callers in two service processes, one engine that dies now and then."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        self.shape = Shape(
            depth=chance.choice((1, 2, 2)),
            num_pages=chance.choice((17, 33, 65)),
            num_rows=chance.choice((2, 4, 6)),
            max_waiting=chance.choice((4, 64)),
            max_draft=chance.choice((0, 0, 3)),
        )
        self.network = Network(chance, delay=chance.choice((0.0005, 0.005)))
        self.histories: list[History] = []
        self.poisons = chance.random() < 0.3
        self.kills = 0

    async def run(self) -> Totals:
        chance, loop = self.chance, asyncio.get_running_loop()
        start = loop.time()
        processes = [
            EngineConnection(f"legato-simulated-{number}-", SHARED, number) for number in range(2)
        ]
        network: Any = self.network
        for each in processes:
            each.connect(network)
        faults = asyncio.create_task(self._engines())
        calls = []
        for number in range(chance.randint(3, chance.choice((6, 6, 20)))):
            await asyncio.sleep(chance.choice((0, 0, chance.expovariate(200))))
            wish = chance.choice((Wish.ANSWER,) * 6 + (Wish.ABORT, Wish.STOP))
            poisoned = self.poisons and chance.random() < 0.1
            request = random_request(chance, number, loop.time(), poisoned=poisoned)
            history = History(request, wish)
            self.histories.append(history)
            patience = chance.uniform(0, 0.2)
            process = chance.choice(processes)
            calls.append(asyncio.create_task(call(process, request, wish, patience, history)))
        await asyncio.gather(*calls)
        self.quiet.set()
        engine = await faults
        for each in processes:
            assert each.num_open == 0, "a stream is left open"
            await each.close()
        await asyncio.sleep(1.0)  # aborts arrive
        incarnation, task = engine
        incarnation.check_rest()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return self._judge(loop.time() - start)

    async def _engines(self) -> tuple[Incarnation, asyncio.Task[None]]:
        """Run engines one after another; return the one that is left when all is quiet."""
        self.quiet = asyncio.Event()
        chance = self.chance
        # A kill while a suspect runs alone would blame it: no request may see three.
        limit = chance.choice((0, 1)) if self.poisons else chance.choice((0, 1, 2))
        while True:
            await asyncio.sleep(chance.uniform(0.0, 0.05))
            incarnation = Incarnation(self.network, self.shape, chance)
            task = asyncio.create_task(incarnation.run())
            dies_after = chance.expovariate(10) if self.kills < limit else 1e9
            quiet = asyncio.create_task(self.quiet.wait())
            await asyncio.wait(
                (quiet, task), timeout=dies_after, return_when=asyncio.FIRST_COMPLETED
            )
            quiet.cancel()
            if task.done() and not isinstance(task.exception(), EngineDied):
                task.result()
            if self.quiet.is_set():
                return incarnation, task
            self.kills += 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _judge(self, seconds: float) -> Totals:
        totals = Totals(1, len(self.histories), self.kills, seconds)
        for history in self.histories:
            history.check()
            if history.error is not None:
                lost = isinstance(history.error, EngineLost) and self.kills > MAX_RESUMPTIONS
                assert lost or isinstance(history.error, EXPECTED_ERRORS), history
            totals.ends[_end_of(history)] += 1
        return totals


def _end_of(history: History) -> str:
    if history.gone:
        return "aborted"
    if history.error is not None:
        return type(history.error).__name__
    assert history.done is not None
    return str(history.done.finish_reason)


def run(seed: int) -> Totals:
    """Run one seed; a failure names it."""
    logging_before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        with (
            virtual_time() as loop,
            mock.patch.object(connection_module, "EngineTransport", SimulatedTransport),
        ):
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(Simulation(seed).run())
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        structlog.configure(**logging_before)
        asyncio.set_event_loop(None)


def run_all(seeds: range) -> Totals:
    totals = Totals()
    for seed in seeds:
        totals.join(run(seed))
    return totals
