"""What Envoy adds to a call: python -m tests.deploy.latency.

A server without a model is asked directly and through Envoy, in turn, by the shipped client.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from legato_client import AsyncClient, QueryTask

from tests.deploy.envoy import Envoy
from tests.e2e.server import Server
from tests.service.harness import image_bytes

ROUNDS, CALLS, CALLERS = 9, 150, 8
IMAGE = image_bytes() + os.urandom(100_000)  # a decoder stops at the image's end

Ask = Callable[[AsyncClient], Awaitable[object]]


async def text(client: AsyncClient) -> None:
    await client.query(None, "How many?")


async def image(client: AsyncClient) -> None:
    await client.query(IMAGE, "How many?")


async def stream(client: AsyncClient) -> None:
    async for _ in client.generate(None, QueryTask("How many?")):
        pass


async def alone(client: AsyncClient, ask: Ask) -> list[float]:
    """Milliseconds of one call after the other."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        await ask(client)
        times.append((time.perf_counter() - start) * 1e3)
    return times


async def together(client: AsyncClient) -> float:
    """Calls a second of several callers."""

    async def caller() -> None:
        for _ in range(CALLS):
            await text(client)

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return CALLERS * CALLS / (time.perf_counter() - start)


async def measure(targets: dict[str, str]) -> None:
    clients = {name: AsyncClient(target) for name, target in targets.items()}
    for ask in (text, image, stream):
        medians: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(ROUNDS):
            for name, client in clients.items():
                medians[name].append(statistics.median(await alone(client, ask)))
        show(f"{ask.__name__}, one at a time, P50 ms", medians)
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(ROUNDS):
        for name, client in clients.items():
            rates[name].append(await together(client))
    show(f"text, {CALLERS} at a time, calls/s", rates)
    for client in clients.values():
        await client.close()


def show(what: str, values: dict[str, list[float]]) -> None:
    """The median of the rounds, with their range."""
    parts = [
        f"{name} {statistics.median(rounds):.2f} ({min(rounds):.2f} to {max(rounds):.2f})"
        for name, rounds in values.items()
    ]
    print(f"{what}: {'; '.join(parts)}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Server(folder, "--model", "null") as server,
            Envoy(folder, server.address) as envoy,
        ):
            asyncio.run(measure({"direct": server.address, "Envoy": envoy.address}))


if __name__ == "__main__":
    main()
