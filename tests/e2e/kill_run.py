"""Kills the engine again and again under load and checks what the clients saw.

    python -m tests.e2e.kill_run --kills 200 -- --processes 2

What follows `--` goes to the server. The run fails when fewer than 99.5 % of the calls end with the
right answer, when one ends with a wrong one, or when something is left in the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
from legato.v1 import inference_pb2, inference_pb2_grpc, session_pb2_grpc, task_pb2

from tests.e2e.history import Answer, Ask, Call, History, Report, Stubs, frame, generate, unary
from tests.e2e.scenes import many_circles, two_shapes
from tests.e2e.server import Server, open_files

ENOUGH = 0.995
WILD = task_pb2.Sampling(temperature=100.0, top_p=1.0, seed=3)
GREEDY = task_pb2.Sampling(temperature=0.0)
TOKENS = inference_pb2.RequestOptions(return_tokens=True)


def wild(max_tokens: int, seed: int = 3) -> task_pb2.Sampling:
    """Tokens at random, the same each time; many, so that a kill meets them."""
    return task_pb2.Sampling(temperature=100.0, top_p=1.0, seed=seed, max_tokens=max_tokens)


def asks(length: int) -> dict[str, Ask]:
    """Calls of every kind by name, greedy and sampled; `length` tokens a long answer."""
    shapes, circles = two_shapes().message(), many_circles(6).message()
    query = task_pb2.QueryTask(question="What is in the image?")
    detect = task_pb2.DetectTask(object="red circle")
    tasks = [
        task_pb2.Task(task_id="a", detect=detect),
        task_pb2.Task(task_id="b", query=query, sampling=wild(length // 2)),
        task_pb2.Task(task_id="c", point=task_pb2.PointTask(object="red circle")),
    ]
    streams = {
        "stream, sampled": task_pb2.Task(query=query, sampling=wild(length)),
        "stream, greedy": task_pb2.Task(
            caption=task_pb2.CaptionTask(length=task_pb2.CAPTION_LENGTH_LONG), sampling=GREEDY
        ),
        "stream of objects": task_pb2.Task(detect=detect),
        "stream of an outline": task_pb2.Task(segment=task_pb2.SegmentTask(object="red circle")),
    }
    return {
        **{
            name: generate(inference_pb2.GenerateRequest(image=circles, task=task, options=TOKENS))
            for name, task in streams.items()
        },
        "text stream": generate(
            inference_pb2.GenerateRequest(
                task=task_pb2.Task(
                    query=task_pb2.QueryTask(question="hello"), sampling=wild(length, seed=4)
                ),
            )
        ),
        "query": unary(
            "Query",
            inference_pb2.QueryRequest(
                image=shapes, question="What?", sampling=wild(length, seed=5), options=TOKENS
            ),
        ),
        "detect": unary("Detect", inference_pb2.DetectRequest(image=circles, object="red circle")),
        "tasks": unary("RunTasks", inference_pb2.RunTasksRequest(image=shapes, tasks=tasks)),
        "session": frame(tasks, circles),
    }


class Load:
    """Calls at random, `width` at a time, until it is stopped."""

    def __init__(self, address: str, calls: dict[str, Ask], width: int, seed: int) -> None:
        self.history = History()
        self._address = address
        self._calls = calls
        self._width = width
        self._random = random.Random(seed)
        self.stopped = False

    async def expected(self) -> dict[str, Answer]:
        """The answers one at a time without faults."""
        async with self._stubs() as stubs:
            return {name: await ask(stubs, Call(name)) for name, ask in self._calls.items()}

    async def run(self) -> None:
        """Every caller has a connection of its own, so that each process gets some."""
        await asyncio.gather(*(self._caller() for _ in range(self._width)))

    async def _caller(self) -> None:
        async with self._stubs() as stubs:
            while not self.stopped:
                name = self._random.choice(sorted(self._calls))
                await self.history.ask(stubs, name, self._calls[name])

    @contextlib.asynccontextmanager
    async def _stubs(self) -> AsyncIterator[Stubs]:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            yield Stubs(
                inference_pb2_grpc.InferenceServiceStub(channel),
                session_pb2_grpc.SessionServiceStub(channel),
            )


async def kill_run(
    server: Server, *, kills: int, width: int = 8, length: int = 120, seed: int = 1
) -> Report:
    """Kill an engine at random moments while calls run; return what the clients saw.

    Four kills of five wait until all calls of the last one have ended; the fifth comes at once, so
    that calls lose two engines and run alone. No call may lose four.
    """
    load = Load(server.address, asks(length), width, seed)
    expected = await load.expected()
    running = asyncio.create_task(load.run())
    history, rng = load.history, random.Random(seed)
    open_calls: list[Call] = []
    for number in range(kills):
        if number % 5 != 4:
            while any(not call.ended for call in open_calls):  # noqa: ASYNC110 - other tasks end them
                await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        open_calls = [call for call in history.calls if not call.ended]
        history.kills.append(time.monotonic())
        pids = await asyncio.to_thread(_running_engines, server)
        os.kill(rng.choice(pids), signal.SIGKILL)
        print(f"kill {number + 1}: {len(history.calls)} calls", file=sys.stderr, flush=True)
        await asyncio.to_thread(_wait_for_engine, server, number + 1)
    load.stopped = True
    await running
    return history.check(expected)


def _running_engines(server: Server) -> list[int]:
    return server.engine_pids


def _wait_for_engine(server: Server, restarts: int) -> None:
    """A kill during the start would not meet any request."""
    while len(server.events("engine_lost")) < restarts or not _all_serve(server):
        time.sleep(0.02)


def _all_serve(server: Server) -> bool:
    return all(each.state == "serving" for each in server.load().engines)


@contextlib.contextmanager
def leaving_nothing(server: Server) -> Iterator[None]:
    """Pages, requests, blobs and open files are back to where they were."""
    server.settle()
    before = open_files(server.process.pid)
    yield
    server.settle()
    after = open_files(server.process.pid)
    grown = {kind: count for kind, count in (after - before).items() if count > 2}
    assert not grown, f"open files grew: {grown}"


def main() -> int:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--length", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("options", nargs="*", help="of the server, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *given.options, program=("-m", "tests.e2e.quick_service"))
        with server, leaving_nothing(server):
            report = asyncio.run(
                kill_run(
                    server,
                    kills=given.kills,
                    width=given.width,
                    length=given.length,
                    seed=given.seed,
                )
            )
        resumed = server.events("request_resumed")
        alone = sum(each["alone"] for each in resumed)
        print(f"{len(resumed)} resumptions, {alone} alone")
    print(report)
    for line in (*report.wrong, *report.failed):
        print(f"  {line}")
    return int(bool(report.wrong) or report.share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
