"""Admission of calls before their messages are read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import unquote

import msgspec
from legato_engine.errors import ClientTooSlow, QueueFull

from legato_service.engines.group import EngineGroup
from legato_service.errors import Failure, failure

RESERVE = 4  # a quarter of the places more for tenants below their share, half of it for priorities
MANY_CALLS = 64  # at a time, whose memory is worth giving back
QUIET_DELAY = 1.0  # seconds


class GateSlot(msgspec.Struct, eq=False):
    """Place of a call in the gate, until its task ends."""

    gate: Gate
    is_submitted: bool = False
    is_paused: bool = False
    tenant: str | None = None

    def take_name(self, tenant: str) -> None:
        self.tenant = tenant
        calls = self.gate.calls_by_tenant
        calls[tenant] = calls.get(tenant, 0) + 1

    def mark_submitted(self) -> None:
        """Mark the call as submitted: the engine counts its requests now."""
        if not self.is_submitted:
            self.is_submitted = True
            self.gate.num_unsubmitted -= 1

    def pause(self) -> None:
        """Release the place while the call's message does not arrive."""
        if not (self.is_paused or self.is_submitted):
            self.is_paused = True
            self.gate.num_unsubmitted -= 1

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self.gate.num_unsubmitted += 1

    @property
    def is_over_share(self) -> bool:
        """Return whether the tenant has at least its equal share of this process's calls."""
        calls = self.gate.calls_by_tenant
        return calls.get(self.tenant or "", 0) * len(calls) >= sum(calls.values())

    def leave(self, _: object) -> None:
        gate, tenant = self.gate, self.tenant
        if not (self.is_submitted or self.is_paused):
            gate.num_unsubmitted -= 1
        if tenant is not None:
            _decrement(gate.calls_by_tenant, tenant)
        gate.note_left()


def _decrement(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Gate:
    """Limit of calls that are read, converted or in the engine. Needs a running event loop.

    They are at most as many as the serving engines run and queue. When these are reached, a quarter
    more is for tenants with fewer calls than others, and half of that also for higher priorities,
    because an engine's full queue gives up other requests for theirs.
    """

    def __init__(self, engines: EngineGroup, on_quiet: Callable[[], None] = lambda: None) -> None:
        """Create the gate; it calls `on_quiet` a while after the last of many calls ended."""
        self._engines = engines
        self._on_quiet = on_quiet
        self._num_calls = 0
        self._most_calls = 0  # since the last quiet
        self.num_unsubmitted = 0
        self.calls_by_tenant: dict[str, int] = {}  # without zeros

    def enter(self, task: asyncio.Task[object]) -> GateSlot:
        self.num_unsubmitted += 1
        self._num_calls += 1
        gate_slot = GateSlot(self)
        task.add_done_callback(gate_slot.leave)
        return gate_slot

    def note_left(self) -> None:
        if self._num_calls > self._most_calls:
            self._most_calls = self._num_calls
        self._num_calls -= 1
        if self._num_calls == 0 and self._most_calls >= MANY_CALLS:
            self._most_calls = 0
            asyncio.get_running_loop().call_later(QUIET_DELAY, self._on_quiet)

    @property
    def is_crowded(self) -> bool:
        """Return whether the newest call needs a decision of `admits`."""
        return self.num_unsubmitted + self._engines.num_open > self._engines.capacity

    def admits(self, tenant: str, priority: int) -> bool:
        """Return whether to admit a call that has its place and its name."""
        num_open = self.num_unsubmitted + self._engines.num_open
        limit = self._engines.capacity
        if num_open <= limit:
            return True
        calls = self.calls_by_tenant
        reserve = limit // RESERVE + 1
        if len(calls) > 1 and calls[tenant] * len(calls) < num_open:
            return num_open <= limit + reserve
        return priority > 0 and num_open <= limit + reserve // 2

    def refusal(self, request_id: str) -> Failure:
        error = QueueFull("too many requests wait", limit=self._engines.capacity)
        if (wait := self._engines.estimated_wait) > 0:
            error.metadata["retry_after_ms"] = str(round(wait * 1000))
        return failure(error, request_id)


RECEIVE_BYTES = 136 * 1024 * 1024
"""Bytes that messages may take while they are received, in a process's listener."""

COPY_SECONDS = 0.5e-9  # per byte of a message, in which gRPC holds the event loop
_REFUSED_SHARE = 0.005  # of the time of the event loop, for the refused messages of a caller
_MIN_CHARGE = 0.0005  # seconds; refusals that cost less are free
_MAX_PAUSE = 5.0  # seconds


class _Pause(asyncio.Event):
    """Set at its end."""

    until = 0.0  # time.monotonic() seconds


class ReceiveLimit:
    """Limit of messages that are received at a time, each as large as a message may be.

    gRPC tells nobody the size of a message before it has all of it, and opens the window of flow
    control as far as the message needs once it is asked for. Until then a sender can have only the
    first window of each call in memory.

    A sender takes another place while it has less than half of those that are free, so a few
    senders cannot take all. A sender whose refused messages held the event loop is paused.
    """

    def __init__(self, places: int) -> None:
        self.num_free = places
        self._taken: dict[str, int] = {}  # by sender, without zeros
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next sender first
        self._paused: dict[str, _Pause] = {}  # by connection

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def take(self, sender: str, connection: str) -> bool:
        """Take a place, unless the sender has to wait for it."""
        if sender in self._waiting or connection in self._paused or not self._has_room(sender):
            return False
        self._take(sender)
        return True

    async def wait(self, sender: str, connection: str) -> None:
        """Wait until the connection's pause is over, then for a place in turn."""
        while pause := self._paused.get(connection):
            await pause.wait()
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(place)
        self._grant()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(sender)
            elif waiting := self._waiting.get(sender):
                waiting.remove(place)
                if not waiting:
                    del self._waiting[sender]
            raise

    def give_back(self, sender: str) -> None:
        self.num_free += 1
        _decrement(self._taken, sender)
        if self._waiting:
            self._grant()

    def charge(self, connection: str, seconds: float) -> None:
        """Pause a connection whose refused message held the event loop for these seconds."""
        if seconds < _MIN_CHARGE:
            return
        pause, now = self._paused.setdefault(connection, _Pause()), time.monotonic()
        pause.until = min(max(now, pause.until) + seconds / _REFUSED_SHARE, now + _MAX_PAUSE)
        loop = asyncio.get_running_loop()
        loop.call_later(pause.until - now, self._resume, connection, pause, pause.until)

    def _resume(self, connection: str, pause: _Pause, until: float) -> None:
        if pause.until == until:  # not longer since
            pause.set()
            del self._paused[connection]

    def _has_room(self, sender: str) -> bool:
        return 2 * self._taken.get(sender, 0) < self.num_free

    def _take(self, sender: str) -> None:
        self.num_free -= 1
        self._taken[sender] = self._taken.get(sender, 0) + 1

    def _grant(self) -> None:
        """Give free places to waiting senders, one each in turn."""
        while sender := next(filter(self._has_room, self._waiting), None):
            waiting = self._waiting.pop(sender)
            place = waiting.popleft()
            if waiting:
                self._waiting[sender] = waiting  # behind the others
            if not place.done():
                self._take(sender)
                place.set_result(None)


# ---------------------------------------------------------------- later messages of a stream

UNFINISHED_BYTES = 64 * 1024 * 1024
"""Bytes that later messages of streams may take while they are incomplete, in a listener."""

_COUNT_PERIOD = 0.05  # seconds
_FRAMING = 1024  # bytes of a message that are not its content, at most: headers and frames,
_FRAMING_SHARE = 64  # and one in so many of large ones, TLS included
_TCP_INFO = struct.Struct("128xQ")  # `tcpi_bytes_received` of Linux


class UnfinishedMessages:
    """Limit of what the connections of streams have sent and not finished.

    A stream that responds as it goes is silent between its messages. So gRPC is asked for the next
    one all the time, and tells nobody what it has of it. But the kernel counts the bytes of each
    connection, and those that have become no message are of unfinished ones. Beyond the limit the
    sender with the most streams of the connection with the most bytes loses these streams.

    Connections of unix sockets are not counted, nor are any outside of Linux.
    """

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, context: Any, message: Any) -> None:
        """Note that a whole message of a call has arrived, or the end of its messages."""
        if self._connections and isinstance(message, bytes):
            connection = self._connections.get(context.peer())
            if connection is not None:
                connection.finished += len(message) + len(message) // _FRAMING_SHARE + _FRAMING

    async def read(self, message: Awaitable[Any], peer: str, sender: str) -> Any:
        """Return a later message of a stream; its connection is counted until this task ends.

        Raises:
            ClientTooSlow: the sender's unfinished messages take too much memory.
        """
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(peer)
        if task not in connection.readers:
            connection.readers[task] = connection.received()
            task.add_done_callback(functools.partial(self._leave, peer, connection))
        connection.waiting[task] = sender
        self._keep_counting()
        try:
            received = await message
        except asyncio.CancelledError:
            if task not in connection.ended:
                raise
        finally:
            connection.readers[task] = connection.received()
            is_ended = task in connection.ended  # maybe just when its message arrived
            del connection.waiting[task], task  # its exception would refer to itself by this frame
        if is_ended:
            raise ClientTooSlow(
                f"unfinished messages take more than {UNFINISHED_BYTES} bytes of memory",
                limit=UNFINISHED_BYTES,
            )
        return received

    def _leave(self, peer: str, connection: _Connection, task: asyncio.Task[Any]) -> None:
        connection.ended.discard(task)
        del connection.readers[task]
        if not connection.readers:
            del self._connections[peer]

    def _keep_counting(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COUNT_PERIOD, self._count)

    def _count(self) -> None:
        self._timer = None
        counted = {each: each.unfinished() for each in self._connections.values() if each.waiting}
        total = sum(counted.values())
        while total > UNFINISHED_BYTES:
            most = max(counted, key=counted.__getitem__)
            total -= counted.pop(most)
            most.end_streams()
        if any(each.waiting for each in self._connections.values()):
            self._keep_counting()


class _Connection:
    """Connection of streams, with the bytes of its messages."""

    def __init__(self, peer: str) -> None:
        _, _, address = peer.partition(":")
        host, _, port = unquote(address).rpartition(":")
        self._peer = host.strip("[]"), port
        self._descriptor = self._find()
        self._last_received = 0
        self.readers: dict[asyncio.Task[Any], int] = {}  # bytes received at their last message
        self.waiting: dict[asyncio.Task[Any], str] = {}  # senders, by reader
        self.ended: set[asyncio.Task[Any]] = set()
        self.finished = self.received()

    def unfinished(self) -> int:
        """Return the bytes of unfinished messages, which have arrived since some last message."""
        received = self.received()
        self.finished = min(self.finished, received)  # the framing took less
        return received - max(self.finished, min(self.readers.values()))

    def end_streams(self) -> None:
        """End those of the sender that has the most."""
        ((sender, _),) = Counter(self.waiting.values()).most_common(1)
        ending = [task for task, each in self.waiting.items() if each == sender]
        self.ended.update(ending)
        for task in ending:
            task.cancel()
        self.finished = self.received()

    def _find(self) -> int | None:
        try:
            descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError:
            return None
        return next((each for each in descriptors if _peer_of(each) == self._peer), None)

    def received(self) -> int:
        """Return the bytes that the connection has received; once it is closed, those of before."""
        if self._descriptor is not None and _peer_of(self._descriptor) == self._peer:
            self._last_received = max(self._last_received, _bytes_received(self._descriptor))
        return self._last_received


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of this descriptor, and leave it open."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _bytes_received(descriptor: int) -> int:
    """Return the bytes that a TCP connection has received; 0 where the kernel does not count."""
    try:
        with _borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0
    return int(_TCP_INFO.unpack(info)[0]) if len(info) == _TCP_INFO.size else 0


def _peer_of(descriptor: int) -> tuple[str, str] | None:
    """Return host and port of the peer of a TCP connection."""
    try:
        with _borrowed(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host, port = connection.getpeername()[:2]
    except OSError:  # no socket, or not connected
        return None
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), str(port)
