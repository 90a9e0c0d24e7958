"""One simulated history from a seed: callers, and what each of them saw.

`python -m tests.simulation.run --seeds 500000` runs many.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import enum
import multiprocessing
import os
import random
import sys
import time
from typing import Any
from unittest import mock

import structlog
from legato_engine.client import connection as connection_module
from legato_engine.client.connection import EngineConnection
from legato_engine.client.recovery import MAX_RESUMPTIONS
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import (
    DeadlineExceeded,
    EngineLost,
    EngineStarting,
    LegatoError,
    PoisonedRequest,
    QueueFull,
)
from legato_engine.ipc import latency_policy
from legato_engine.ipc.messages import Done, OutputDelta, PrefillStarted, QueuePosition
from legato_engine.types import (
    CachedImageRef,
    FinishReason,
    QueryOutput,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TextEvent,
)

from tests.fakes import SILENT_EVERY
from tests.simulation.engine_host import (
    POISON,
    PREFIX,
    EngineDied,
    Incarnation,
    Network,
    Shape,
    SimulatedTransport,
    task_of,
    virtual_time,
)

# ---------------------------------------------------------------- callers
# Callers and the history of what each of them saw.

RETRY = 0.02  # seconds
EXPECTED_ERRORS = (QueueFull, DeadlineExceeded, PoisonedRequest)


class Wish(enum.Enum):
    """What a caller does besides waiting."""

    ANSWER = 0
    ABORT = 1
    STOP = 2


@dataclasses.dataclass
class History:
    """What a caller saw of one request."""

    request: Request
    wish: Wish
    texts: list[str] = dataclasses.field(default_factory=list)
    num_queued: int = 0
    num_started: int = 0
    done: Done | None = None
    error: LegatoError | None = None
    gone: bool = False  # the caller went away
    ended_at: float = 0.0
    num_refused: int = 0  # while no engine was ready

    @property
    def is_poison(self) -> bool:
        return self.request.sampling.seed == POISON

    def check(self) -> None:
        """One end, no event lost, doubled or changed."""
        assert (self.done is not None) + (self.error is not None) + self.gone == 1, self
        expected = expected_tokens(self.request)
        words = [str(token) for token in expected if token % SILENT_EVERY]
        text = "".join(self.texts)
        if self.request.deltas:
            assert "".join(words).startswith(text), f"{self}: expected {words}"
        if self.done is not None:
            self._check_done(self.done, expected, text)
        if isinstance(self.error, PoisonedRequest):
            assert self.is_poison, "a request that ends no engine is blamed"
        if self.is_poison and self.done is not None:
            assert self.done.finish_reason is FinishReason.CANCELLED, "no engine survives it"
        if isinstance(self.error, DeadlineExceeded):
            assert self.request.deadline is not None, "a deadline out of nothing"

    def _check_done(self, done: Done, expected: list[int], text: str) -> None:
        assert isinstance(done.result, QueryOutput)
        tokens = [int(word) for word in done.result.answer.split()]
        if done.finish_reason is FinishReason.CANCELLED:
            assert self.wish is Wish.STOP, "stopped without being asked"
            assert tokens == expected[: len(tokens)], "a stopped request has other tokens"
        else:
            assert tokens == expected, f"{self}: expected {expected}"
        assert done.usage.output_tokens == len(tokens)
        if self.request.deltas:
            words = [str(token) for token in tokens if token % SILENT_EVERY]
            assert text == "".join(words), f"{self}: {tokens}"


def expected_tokens(request: Request) -> list[int]:
    """The tokens of a run without faults, alone."""
    task = task_of(request)
    prefix = PREFIX if request.image is not None else 1
    return task.expected_tokens(prefix + len(task.prompt))


def random_request(chance: random.Random, number: int, now: float, *, poisoned: bool) -> Request:
    image = CachedImageRef(image_id=f"img_{chance.randrange(4)}") if chance.random() < 0.4 else None
    deadline = now + chance.uniform(0.001, 3.0) if chance.random() < 0.2 else None
    streams = chance.random() < 0.6
    return Request(
        request_id=RequestKey(f"r{number}", chance.choice(("", "a", "b"))),
        task=QuerySpec(question=f"{chance.randint(1, 12)} {chance.choice('01')}"),
        image=image,
        sampling=SamplingParams(
            seed=POISON if poisoned else chance.randrange(1000), max_tokens=chance.randint(1, 24)
        ),
        deadline=deadline,
        cache_image=chance.random() < 0.8,
        deltas=streams,
        progress=streams,
        priority=chance.choice((0, 0, 0, 5, -5)),
    )


async def call(
    connection: EngineConnection, request: Request, wish: Wish, patience: float, history: History
) -> None:
    """Submit a request and read it to its end; `patience` seconds later act on the wish."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            stream = connection.submit(request)
            break
        except (EngineStarting, EngineLost):  # a client retries what is UNAVAILABLE
            history.num_refused += 1
            await asyncio.sleep(RETRY)
        except LegatoError as error:
            history.error, history.ended_at = error, loop.time()
            return
    if wish is Wish.ABORT:
        timer = loop.call_later(patience, _leave, stream, history)
    elif wish is Wish.STOP:
        timer = loop.call_later(patience, stream.stop)
    else:
        timer = None
    try:
        if request.deltas:
            await _read(stream, history)
        else:
            await _await_done(stream, history)
    except LegatoError as error:
        if not history.gone:
            history.error = error
    finally:
        history.ended_at = loop.time()
        if timer is not None:
            timer.cancel()


def _leave(stream: RequestStream, history: History) -> None:
    if not stream.ended:
        history.gone = True
        stream.abort()


async def _await_done(stream: RequestStream, history: History) -> None:
    try:
        done = await stream.done()
    except LegatoError:
        if history.gone:
            return
        raise
    assert not history.gone
    history.done = done


async def _read(stream: RequestStream, history: History) -> None:
    async for output in stream:
        assert history.done is None, "an output after the last"
        match output:
            case QueuePosition():
                history.num_queued += 1
            case PrefillStarted():
                history.num_started += 1
            case OutputDelta(events=events):
                for event in events:
                    assert isinstance(event, TextEvent)
                    history.texts.append(event.text)
            case Done():
                history.done = output


# ---------------------------------------------------------------- run
# One simulated history from a seed.

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


# ---------------------------------------------------------------- command

PART = 500  # seeds


def main() -> int:
    """Print progress; the first failure ends the run and names its seed."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", default=500_000, type=int)
    parser.add_argument("--first", default=0, type=int)
    parser.add_argument("--processes", default=os.cpu_count() or 1, type=int)
    arguments = parser.parse_args()
    stop = arguments.first + arguments.seeds
    parts = [range(at, min(at + PART, stop)) for at in range(arguments.first, stop, PART)]
    totals, start = Totals(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for part in pool.imap(run_all, parts):
            totals.join(part)
            sys.stdout.write(f"{time.monotonic() - start:.0f} s: {totals}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
