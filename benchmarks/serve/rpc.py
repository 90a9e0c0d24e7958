"""End to end through gRPC on loopback: latency of one caller, many callers at once, memory."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from legato_client import AsyncClient
from legato_client.cli.demo import LocalServer
from PIL import Image, ImageDraw

from benchmarks import record

OBJECT = "red circle"
START_TIMEOUT = 300.0
CALL_TIMEOUT = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds over `calls` calls that took `seconds` in all."""

    calls: int
    failed: int
    p50: float
    p95: float
    maximum: float
    seconds: float

    @property
    def per_second(self) -> float:
        """Answers a second."""
        return (self.calls - self.failed) / self.seconds


def jpeg(index: int, size: tuple[int, int]) -> bytes:
    """Return a JPEG unique to its index: two red circles and a blue square on noise."""
    width, height = size
    noise = np.random.default_rng(index).integers(190, 240, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    pen = ImageDraw.Draw(image)
    unit = min(size) // 4
    pen.ellipse((unit // 2, unit // 2, unit * 3 // 2, unit * 3 // 2), fill=(215, 35, 35))
    pen.ellipse(
        (width - 2 * unit, height - 2 * unit, width - unit, height - unit), fill=(215, 35, 35)
    )
    pen.rectangle((width - 2 * unit, unit // 2, width - unit, unit * 3 // 2), fill=(40, 80, 215))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=90)
    return data.getvalue()


async def timed(call: Callable[[int], Awaitable[object]], count: int, callers: int) -> Latency:
    """Time `count` calls by `callers` at once; each caller sends again when it is answered."""
    durations: list[float] = []
    failures = 0
    indices = iter(range(count))

    async def caller() -> None:
        nonlocal failures
        for index in indices:
            start = time.perf_counter()
            try:
                await call(index)
            except Exception as error:  # noqa: BLE001 - a benchmark counts what failed and goes on
                failures += 1
                print(f"call {index} failed: {error!r}")
            durations.append((time.perf_counter() - start) * 1e3)

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds = time.perf_counter() - start
    p95 = record.quantiles(durations, n=20)[-1]
    return Latency(count, failures, statistics.median(durations), p95, max(durations), seconds)


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process and all its descendants."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next((int(line.split()[1]) for line in status if line.startswith("VmRSS")), 0)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return resident / 1024 + sum(memory_mib(int(child)) for child in children)


async def measure(target: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures on one running server."""
    size = (arguments.width, arguments.height)
    detect = {"max_objects": arguments.max_objects, "timeout": CALL_TIMEOUT}
    async with AsyncClient(target) as client:
        fixed = jpeg(0, size)
        await timed(lambda i: client.detect(jpeg(10_000 + i, size), OBJECT, **detect), 5, 1)
        images = [jpeg(1 + i, size) for i in range(arguments.alone)]
        alone = await timed(lambda i: client.detect(images[i], OBJECT, **detect), len(images), 1)
        await client.detect(fixed, OBJECT, **detect)
        cached = await timed(lambda _: client.detect(fixed, OBJECT, **detect), arguments.alone, 1)
        crowd = [jpeg(20_000 + i, size) for i in range(arguments.calls)]
        warm = crowd[: arguments.callers]
        await timed(lambda i: client.detect(warm[i], OBJECT, **detect), len(warm), len(warm))
        before = memory_mib(pid)
        many = await timed(
            lambda i: client.detect(crowd[i], OBJECT, **detect), len(crowd), arguments.callers
        )
        after = memory_mib(pid)
        example = await client.detect(fixed, OBJECT, **detect)
    return {
        "alone": dataclasses.asdict(alone),
        "cached": dataclasses.asdict(cached),
        "many": dataclasses.asdict(many) | {"callers": arguments.callers},
        "answers_per_second": many.per_second,
        "memory_mib": {"before": before, "after": after},
        "objects_found": len(example.objects),
        "output_tokens": example.info.usage.output_tokens if example.info.usage else 0,
    }


def main(argv: Sequence[str]) -> int:
    """Start a server, measure, record. Options after `--` go to `legato serve`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rpc", description=__doc__)
    parser.add_argument("--name", default="rpc", help="of the record")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--alone", type=int, default=30, help="calls one after another")
    parser.add_argument("--callers", type=int, default=64, help="callers at once")
    parser.add_argument("--calls", type=int, default=192, help="calls of all callers together")
    parser.add_argument("--max-objects", type=int, default=10)
    arguments, serve = parser.parse_known_args(argv)
    serve = [option for option in serve if option != "--"]
    with LocalServer(serve) as server:
        server.wait_until_serving(START_TIMEOUT, lambda _: None)
        figures = asyncio.run(measure(server.target, server.pid, arguments))
    figures["serve"] = serve
    rows = [
        [name, *(f"{figures[key][part]:.1f}" for part in ("p50", "p95", "maximum"))]
        for name, key in (
            ("new image, alone", "alone"),
            ("cached image, alone", "cached"),
            (f"new images, {arguments.callers} callers", "many"),
        )
    ]
    memory = figures["memory_mib"]
    summary = (
        f"{figures['answers_per_second']:.2f} answers a second with {arguments.callers} callers, "
        f"{figures['many']['failed']} of {arguments.calls} calls failed; resident memory "
        f"{memory['before']:.0f} MiB before, {memory['after']:.0f} MiB after; "
        f"{figures['output_tokens']} tokens and {figures['objects_found']} boxes an answer."
    )
    size = f"{arguments.width}x{arguments.height}"
    title = f"Detect through gRPC, {size} JPEG: {' '.join(serve) or 'defaults'}"
    heads = ("Detect", "P50 ms", "P95 ms", "max ms")
    record.write(arguments.name, title, figures, [record.table(heads, rows), "", summary])
    return 0 if figures["many"]["failed"] == 0 else 1
