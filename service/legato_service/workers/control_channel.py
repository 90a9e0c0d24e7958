"""Control channels between the first process and its workers.

Its end tells each process that the other one is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable

import msgspec

from legato_service.metrics import catalogue
from legato_service.metrics.snapshot import Snapshot, merged

_MAX_MESSAGE = 64 * 1024 * 1024  # bytes


class Serving(msgspec.Struct, frozen=True, tag=True):
    """Report of a worker that it serves requests."""


class DrainCommand(msgspec.Struct, frozen=True, tag=True):
    """Drain message: a worker asks for it, the first process orders it."""

    grace: float  # seconds


class WithdrawCommand(msgspec.Struct, frozen=True, tag=True):
    """Order to a worker: report not serving, and serve on."""


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Reply with `Collected`: a worker with its metrics, the first process with those of all."""

    number: int


class Collected(msgspec.Struct, frozen=True, tag=True):
    """The reply to the `Collect` of this number."""

    number: int
    snapshot: Snapshot


Message = Serving | DrainCommand | WithdrawCommand | Collect | Collected

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


class ControlChannel:
    """Endpoint of a control channel; messages are lines of JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def from_socket(cls, connection: socket.socket) -> ControlChannel:
        """Open a channel over a connected socket, which it then owns."""
        return cls(*await asyncio.open_unix_connection(sock=connection, limit=_MAX_MESSAGE))

    def send(self, message: Message) -> None:
        """Send a message; without effect if the other end is closed."""
        self._writer.write(_encode(message) + b"\n")

    async def receive(self) -> Message | None:
        """Return None when the other end is closed."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        return _decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._writer.close()


# ---------------------------------------------------------------- metrics exchange

TIMEOUT = 2.0  # seconds for another process to reply
_GROWING = frozenset(each.name for each in catalogue.OWN if each.kind in ("counter", "histogram"))


class MetricsExchange:
    """Metrics requests to the other end, and replies to its own, made by `collect`."""

    def __init__(self, channel: ControlChannel, collect: Callable[[], Awaitable[Snapshot]]) -> None:
        self._channel = channel
        self._collect = collect
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Snapshot]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def request(self) -> Snapshot | None:
        """Return the other end's metrics, or None if it does not reply in time."""
        number = next(self._numbers)
        reply: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._channel.send(Collect(number=number))
        try:
            async with asyncio.timeout(TIMEOUT):
                return await reply
        except TimeoutError:
            return None
        finally:
            del self._waiting[number]

    def receive(self, message: Collect | Collected) -> None:
        if isinstance(message, Collect):
            task = asyncio.create_task(self._reply(message.number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (reply := self._waiting.get(message.number)) is not None and not reply.done():
            reply.set_result(message.snapshot)

    async def _reply(self, number: int) -> None:
        self._channel.send(Collected(number=number, snapshot=await self._collect()))


class WorkerMetrics:
    """The metrics of all workers, as the first process adds them up.

    A worker that does not reply counts with its last reply, and one that died still counts in
    what only grows, so that sums never fall.
    """

    def __init__(self) -> None:
        self._exchanges: dict[int, MetricsExchange] = {}  # by number of a running worker
        self._latest: dict[int, Snapshot] = {}
        self._ended = Snapshot()

    def add(self, number: int, exchange: MetricsExchange) -> None:
        self._exchanges[number] = exchange

    def remove(self, number: int) -> None:
        self._exchanges.pop(number, None)
        if (latest := self._latest.pop(number, None)) is not None:
            growing = [each for each in latest.series if each.name in _GROWING]
            self._ended = merged((self._ended, Snapshot(growing)))

    async def gather(self) -> Snapshot:
        exchanges = list(self._exchanges.items())
        replies = await asyncio.gather(*(exchange.request() for _, exchange in exchanges))
        for (number, exchange), reply in zip(exchanges, replies, strict=True):
            if reply is not None and self._exchanges.get(number) is exchange:
                self._latest[number] = reply
        return merged((self._ended, *self._latest.values()))
