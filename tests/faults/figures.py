"""Measure the faults of docs/reliability.md: `python -m tests.faults.figures hostile greedy`.

Each case runs a server of its own with its default settings, unless it says otherwise, and prints
one line a figure. Absolute times are those of the machine, so they stand in no test.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc
from legato.v1 import image_pb2, image_pb2_grpc, inference_pb2, inference_pb2_grpc, media_pb2

from benchmarks.serve import ghz_check
from tests import hostile_images
from tests.e2e.scenes import long_stream
from tests.e2e.server import Server, children, open_files, own_bytes
from tests.hostile_images import file, smooth
from tests.service.harness import read_refusal

APART = [("grpc.use_local_subchannel_pool", 1)]
QUESTION = inference_pb2.QueryRequest(question="What is in the picture?")
_MB = 1e6


@dataclasses.dataclass
class Tally:
    """How calls ended, and the seconds that each took, by that end."""

    seconds: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def count(self, end: str) -> int:
        return len(self.seconds.get(end, ()))

    def quantile(self, q: float, end: str = "OK") -> float:
        """Milliseconds."""
        times = sorted(self.seconds.get(end, ())) or [float("nan")]
        return 1000 * times[min(len(times) - 1, int(q * len(times)))]

    def ends(self) -> dict[str, int]:
        return {end: len(times) for end, times in sorted(self.seconds.items())}

    async def add(self, call: Awaitable[Any]) -> None:
        began = time.perf_counter()
        try:
            await call
            end = "OK"
        except grpc.aio.AioRpcError as error:
            end = read_refusal(error).reason or f"bare {error.code().name}"
        self.seconds[end].append(time.perf_counter() - began)


def say(case: str, text: str) -> None:
    sys.stdout.write(f"{case}: {text}\n")
    sys.stdout.flush()


def in_process(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start `work` where it takes no time of this process's event loop."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    return process


def _detect(stub: Any, data: bytes, timeout: float = 90.0) -> Awaitable[Any]:
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    call: Awaitable[Any] = stub.Detect(
        inference_pb2.DetectRequest(image=image, object="cat"), timeout=timeout
    )
    return call


def _stub(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel)


# ---------------------------------------------------------------- hostile images


def _send_hostile(address: str, count: int, go: Event) -> None:
    """Have `count` hostile images in flight until all are answered, five times."""
    images = [data for data in hostile_images.hostile().values() if len(data) < 3 << 20]

    async def run() -> None:
        tally = Tally()
        channels = [grpc.aio.insecure_channel(address, APART) for _ in range(8)]
        go.wait()
        for _ in range(5):
            stubs = [_stub(channels[number % 8]) for number in range(count)]
            calls = [_detect(each, images[n % len(images)]) for n, each in enumerate(stubs)]
            await asyncio.gather(*map(tally.add, calls))
        say("hostile", f"the hostile images ended {tally.ends()}")

    asyncio.run(run())


async def _small_images(address: str, done: Callable[[int], bool]) -> Tally:
    """One after the other, a small new image each, with a pause of 20 ms."""
    tally = Tally()
    async with grpc.aio.insecure_channel(address, APART) as channel:
        number = 0
        while not done(number):
            image = file(smooth(64 + number % 400, 48 + number // 400), "JPEG")
            await tally.add(_detect(_stub(channel), image))
            number += 1
            await asyncio.sleep(0.02)
    return tally


async def hostile(folder: Path) -> None:
    with Server(folder) as server:
        engine, before = server.engine_pid, own_bytes(server.engine_pid)
        await _small_images(server.address, lambda number: number == 50)
        alone = await _small_images(server.address, lambda number: number == 400)
        go = multiprocessing.get_context("spawn").Event()
        sender = in_process(_send_hostile, server.address, 100, go)
        await asyncio.sleep(5)  # it makes its images
        go.set()
        beside = await _small_images(server.address, lambda number: not sender.is_alive())
        server.settle()
        for name, tally in (("alone", alone), ("beside 100 hostile images", beside)):
            say(
                "hostile",
                f"others {name}: {tally.ends()}, P50 {tally.quantile(0.5):.1f}, "
                f"P99 {tally.quantile(0.99):.1f} ms",
            )
        grown = (own_bytes(engine) - before) / _MB
        workers = [own_bytes(pid) / _MB for pid in children(engine)]
        same = server.engine_pid == engine
        say("hostile", f"same engine: {same}; grew by {grown:.1f} MB; decoders {workers} MB")


# ---------------------------------------------------------------- uploads that are no images


async def undecodable(folder: Path, count: int = 100_000) -> None:
    with Server(folder, "--model", "null") as server:
        pids = {"service": server.process.pid, "engine": server.engine_pid}
        channels = [grpc.aio.insecure_channel(server.address, APART) for _ in range(8)]
        tally = Tally()

        async def uploads(channel: grpc.aio.Channel, number: int) -> None:
            stub: Any = image_pb2_grpc.ImageServiceStub(channel)
            for _ in range(number):
                parts = [
                    image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()),
                    image_pb2.PutImageRequest(chunk=b"\x89PNG\r\n\x1a\nnot an image" * 50),
                ]
                await tally.add(stub.PutImage(iter(parts)))

        async def all_of(number: int) -> None:
            await asyncio.gather(*(uploads(each, number // 8) for each in channels))

        await all_of(count // 10)
        server.settle()
        before = {n: (own_bytes(p), sum(open_files(p).values())) for n, p in pids.items()}
        for part in range(10):
            await all_of(count // 10)
            for name, pid in pids.items():
                grown = (own_bytes(pid) - before[name][0]) / _MB
                files = sum(open_files(pid).values()) - before[name][1]
                done = (part + 1) * count // 10
                say("undecodable", f"{name} after {done}: {grown:+.2f} MB, {files:+d} files")
        say("undecodable", f"ends {tally.ends()}")


# ---------------------------------------------------------------- more than a server can do


async def _flood(address: str, rate: float, seconds: float, tenant: str, callers: int) -> None:
    """Open-loop calls by ghz at `rate` a second over `callers` connections; say how they ended.

    ghz is in Go: an event loop of Python is busy with itself at a few thousand calls a second.
    """
    with tempfile.TemporaryDirectory() as folder:
        protoset, output = Path(folder) / "legato.binpb", Path(folder) / "ghz.json"
        protoset.write_bytes(ghz_check.descriptors(inference_pb2.DESCRIPTOR).SerializeToString())
        ghz = await asyncio.create_subprocess_exec(
            *("ghz", "--insecure", "--protoset", str(protoset), "--call", ghz_check.CALL),
            *("--data", json.dumps(ghz_check.REQUEST), "--async", "--timeout", "30s"),
            *("--metadata", json.dumps({"legato-tenant": tenant})),
            *("--rps", str(round(rate)), "--connections", str(callers)),
            *("--concurrency", str(callers), "--duration", f"{seconds:.0f}s"),
            *("--duration-stop", "wait", "--format", "json", "--output", str(output), address),
        )
        assert await ghz.wait() == 0
        calls = json.loads(output.read_text())["details"]
    tally = Tally()
    for call in calls:
        tally.seconds[call["error"] or call["status"]].append(call["latency"] / 1e9)
    refused = [end for end in tally.ends() if end != "OK"]
    times = ", ".join(f"{end!r} P99 {tally.quantile(0.99, end):.1f} ms" for end in refused)
    say(
        tenant,
        f"offered {len(calls) / seconds:.0f}/s, answered {tally.count('OK') / seconds:.0f}/s "
        f"({tally.count('OK') / len(calls):.1%}), P99 {tally.quantile(0.99):.1f} ms; "
        f"{tally.ends()}; {times}",
    )


async def overload(folder: Path) -> None:
    """First the engine is the bottleneck (16 rows of 16 tokens of 20 ms), then the service."""
    rows = ("--null-step-ms", "20")
    with Server(folder, "--model", "null", *rows) as server:
        for rate in (45, 500, 1000, 2000):
            await _flood(server.address, rate, 8.0, "overload", 16)
        server.settle()
    folder = folder / "fast"
    folder.mkdir()
    with Server(folder, "--model", "null") as server:  # the service is
        for rate in (500, 1000, 2000, 5000):
            await _flood(server.address, rate, 8.0, "cpu-bound", 16)
        server.settle()


async def greedy(folder: Path) -> None:
    """A tenant asks for a tenth of the capacity while another asks for ten times all of it."""
    rows = ("--null-step-ms", "20")
    with Server(folder, "--model", "null", *rows) as server:
        capacity = 50.0
        flood = _flood(server.address, 10 * capacity, 20.0, "greedy", 60)
        flooding = asyncio.create_task(flood)
        await asyncio.sleep(4)
        await _flood(server.address, capacity / 10, 12.0, "small", 1)
        await flooding


async def streams(folder: Path, count: int = 2000) -> None:
    """Streams whose callers read nothing; 400 tokens each."""
    with Server(folder, "--model", "null") as server:
        pid = server.process.pid
        before = own_bytes(pid)
        request = long_stream(400)
        channels = [grpc.aio.insecure_channel(server.address, APART) for _ in range(20)]
        calls = [_stub(channels[n % 20]).Generate(request, timeout=60) for n in range(count)]
        peak = 0
        for _ in range(100):
            await asyncio.sleep(0.1)
            peak = max(peak, own_bytes(pid) - before)
        for call in calls:
            call.cancel()
        await asyncio.sleep(3)
        after = own_bytes(pid) - before
        say("streams", f"{count} unread: {peak / _MB:.1f} MB at most, {after / _MB:.1f} MB after")


CASES: dict[str, Callable[[Path], Coroutine[Any, Any, None]]] = {
    each.__name__: each for each in (hostile, undecodable, overload, greedy, streams)
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="figures", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[*CASES])
    for case in parser.parse_args(argv).cases:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(CASES[case](Path(folder)))


if __name__ == "__main__":
    main()
