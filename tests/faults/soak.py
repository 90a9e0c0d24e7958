"""Mixed traffic against one server for a long time: `python -m tests.faults.soak --minutes 60`.

Every kind of call; two kinds of nine are cancelled, two are refused. Fails when a call ends
otherwise than it must, or when memory, descriptors or threads of a process grow with the calls.
Calls that are cancelled may cost what gRPC loses with them; `--uncancelled` leaves them out.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from legato.v1 import (
    image_pb2,
    image_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    session_pb2_grpc,
    task_pb2,
)

from tests.e2e.scenes import long_stream, session_of, two_shapes
from tests.e2e.server import Server, open_files, own_bytes

MAX_SLOPE = 10.0
"""Bytes per call that a process may grow after the warm-up: 1 MB in 100,000 calls."""
LOST_BATCH = 300.0
"""Bytes that gRPC loses with a cancelled call: what its core was doing for the call when the
cancellation came is never freed, some 80 bytes a step and the message (grpc/grpc#43360)."""
MAX_MORE = 8  # descriptors or threads above the first sample, connections aside
_SAMPLES = 40
_WARM_UP = 0.25  # of the samples
_TICK = 0.01  # seconds

Code = grpc.StatusCode
Job = Callable[["Traffic"], Awaitable[Code]]


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a process held after `calls` calls."""

    calls: int
    num_bytes: int
    files: int
    threads: int


def sample(pid: int, calls: int) -> Sample:
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return Sample(calls, own_bytes(pid), sum(open_files(pid).values()), threads)


def slope(samples: Sequence[Sample]) -> float:
    """Bytes per call, by Theil and Sen: the median over all pairs, which outliers do not move."""
    slopes = sorted(
        (late.num_bytes - early.num_bytes) / (late.calls - early.calls)
        for index, early in enumerate(samples)
        for late in samples[index + 1 :]
        if late.calls > early.calls
    )
    return slopes[len(slopes) // 2] if slopes else 0.0


def growth(samples: Sequence[Sample], max_slope: float) -> list[str]:
    """What grows with the calls; empty if nothing does."""
    settled = samples[round(len(samples) * _WARM_UP) :]
    found = []
    if (measured := slope(settled)) > max_slope:
        found.append(f"memory grows by {measured:.1f} bytes a call, {max_slope:.1f} may be")
    first, last = settled[0], settled[-1]
    for what in ("files", "threads"):
        more = getattr(last, what) - getattr(first, what)
        if more > MAX_MORE:
            found.append(f"{more} more {what} than at first")
    return found


class Traffic:
    """Sends random calls of all kinds over one channel."""

    def __init__(self, channel: grpc.aio.Channel, seed: int, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.chance = random.Random(seed)
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self.images: Any = image_pb2_grpc.ImageServiceStub(channel)
        self.sessions: Any = session_pb2_grpc.SessionServiceStub(channel)
        self.scenes = [two_shapes(offset).file() for offset in range(0, 60, 5)]
        self.ends: collections.Counter[str] = collections.Counter()
        self.calls = 0
        self.wrong: list[str] = []

    def image(self) -> media_pb2.Image:
        data = self.chance.choice(self.scenes)
        return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))

    async def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            name = self.chance.choice(self.kinds)
            job, expected = JOBS[name]
            try:
                code = await job(self)
            except grpc.aio.AioRpcError as error:
                code = error.code()
            except asyncio.CancelledError:
                if "cancelled" not in name:
                    raise
                code = Code.CANCELLED
            self.calls += 1
            self.ends[f"{name} {code.name}"] += 1
            if code not in expected and len(self.wrong) < 20:
                self.wrong.append(f"{name} ended with {code.name}")


async def _query(traffic: Traffic) -> Code:
    await traffic.inference.Query(
        inference_pb2.QueryRequest(question="hello", sampling=task_pb2.Sampling(max_tokens=8))
    )
    return Code.OK


async def _detect(traffic: Traffic) -> Code:
    await traffic.inference.Detect(
        inference_pb2.DetectRequest(image=traffic.image(), object="red circle")
    )
    return Code.OK


async def _generate(traffic: Traffic) -> Code:
    async for _ in traffic.inference.Generate(long_stream(12)):
        pass
    return Code.OK


async def _generate_cancelled(traffic: Traffic) -> Code:
    stream = traffic.inference.Generate(long_stream(200))
    await stream.read()
    stream.cancel()
    return await stream.code()


async def _detect_cancelled(traffic: Traffic) -> Code:
    call = traffic.inference.Detect(
        inference_pb2.DetectRequest(image=traffic.image(), object="red circle")
    )
    await asyncio.sleep(traffic.chance.uniform(0, 0.005))
    call.cancel()
    return await call.code()


async def _malformed(traffic: Traffic) -> Code:
    await traffic.inference.Detect(inference_pb2.DetectRequest(object="red circle"))
    return Code.OK


async def _undecodable(traffic: Traffic) -> Code:
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=os.urandom(500)))
    await traffic.inference.Detect(inference_pb2.DetectRequest(image=image, object="red circle"))
    return Code.OK


async def _session(traffic: Traffic) -> Code:
    stream = traffic.sessions.Session(iter(session_of(long_stream(8, image=traffic.image()))))
    async for _ in stream:
        pass
    return await stream.code()


async def _uploads(traffic: Traffic) -> Code:
    data = traffic.chance.choice(traffic.scenes)
    header = image_pb2.PutImageHeader(mime_type="image/png", size_bytes=len(data))
    messages = [image_pb2.PutImageRequest(header=header), image_pb2.PutImageRequest(chunk=data)]
    held = await traffic.images.PutImage(iter(messages))
    request = inference_pb2.DetectRequest(
        image=media_pb2.Image(image_id=held.image.image_id), object="red circle"
    )
    await traffic.inference.Detect(request)
    return Code.OK


_FINE = {Code.OK}
_CANCELLED = {Code.OK, Code.CANCELLED}
_REFUSED = {Code.INVALID_ARGUMENT}
JOBS: dict[str, tuple[Job, set[Code]]] = {
    "query": (_query, _FINE),
    "detect": (_detect, _FINE),
    "generate": (_generate, _FINE),
    "session": (_session, _FINE),
    "upload": (_uploads, _FINE),
    "generate cancelled": (_generate_cancelled, _CANCELLED),
    "detect cancelled": (_detect_cancelled, _CANCELLED),
    "malformed": (_malformed, _REFUSED),
    "undecodable": (_undecodable, _REFUSED),
}


@dataclasses.dataclass
class Report:
    """What a soak saw."""

    calls: int
    ends: collections.Counter[str]
    problems: list[str]
    samples: dict[str, list[Sample]]


def allowance(ends: collections.Counter[str]) -> float:
    """Bytes a call that gRPC may lose in traffic that ended so."""
    cancelled = sum(number for end, number in ends.items() if end.endswith(Code.CANCELLED.name))
    return LOST_BATCH * cancelled / max(1, ends.total())


async def soak(
    server: Server,
    *,
    seconds: float = math.inf,
    calls: float = math.inf,
    callers: int,
    seed: int = 0,
    max_slope: float = MAX_SLOPE,
    kinds: Sequence[str] = tuple(JOBS),
) -> Report:
    """Run the traffic of `callers` callers, each with its channel, and watch both processes.

    It is over after the seconds, or the calls.
    """
    pids = {"service": server.process.pid, "engine": server.engine_pid}
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    channels = [
        grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(callers)
    ]
    traffic = [Traffic(channel, seed + number, kinds) for number, channel in enumerate(channels)]
    begin = time.monotonic()

    def num_calls() -> int:
        return sum(each.calls for each in traffic)

    def share() -> float:
        return max((time.monotonic() - begin) / seconds, num_calls() / calls)

    running = [asyncio.create_task(each.run(lambda: share() >= 1)) for each in traffic]
    for number in range(1, _SAMPLES + 1):
        while share() < number / _SAMPLES and not any(each.done() for each in running):  # noqa: ASYNC110 - time passes, too
            await asyncio.sleep(_TICK)
        for name, pid in pids.items():
            samples[name].append(sample(pid, num_calls()))
    await asyncio.gather(*running)
    for channel in channels:
        await channel.close()
    problems = [problem for each in traffic for problem in each.wrong]
    ends = sum((each.ends for each in traffic), collections.Counter[str]())
    allowed = {"service": max_slope + allowance(ends), "engine": max_slope}
    for name, taken in samples.items():
        problems += [f"{name}: {problem}" for problem in growth(taken, allowed[name])]
    return Report(num_calls(), ends, problems, samples)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", default=60.0, type=float)
    parser.add_argument("--callers", default=8, type=int)
    parser.add_argument("--model", default="null")
    parser.add_argument("--uncancelled", action="store_true", help="leave out what is cancelled")
    arguments = parser.parse_args(argv)
    kinds = [kind for kind in JOBS if not (arguments.uncancelled and "cancelled" in kind)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder), "--model", arguments.model) as server,
    ):
        report = asyncio.run(
            soak(server, seconds=arguments.minutes * 60, callers=arguments.callers, kinds=kinds)
        )
        server.settle()
        for number, end in sorted((n, end) for end, n in report.ends.items()):
            sys.stdout.write(f"{number:9d} {end}\n")
        for name, taken in report.samples.items():
            first, last = taken[round(len(taken) * _WARM_UP)], taken[-1]
            sys.stdout.write(
                f"{name}: {first.num_bytes / 1e6:.1f} MB, {first.files} files, {first.threads} "
                f"threads at {first.calls} calls; {last.num_bytes / 1e6:.1f} MB, {last.files} "
                f"files, {last.threads} threads at {last.calls}; {slope(taken[10:]):+.2f} B/call\n"
            )
        for problem in report.problems:
            sys.stdout.write(f"PROBLEM {problem}\n")
        return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
