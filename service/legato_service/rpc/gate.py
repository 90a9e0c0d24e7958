"""Admission of calls before their messages are read."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from legato_engine.errors import QueueFull

from legato_service.engines.group import EngineGroup
from legato_service.errors import Failure, failure

RESERVE = 4  # a quarter of the places more for tenants below their share, half of it for priorities
MANY_CALLS = 64  # at a time, whose memory is worth giving back
QUIET_DELAY = 1.0  # seconds
_REFUSALS = 8  # retry times of different jitter
_REFUSALS_AGE = 0.25  # seconds that a retry time stays true

Trailers = tuple[tuple[str, str | bytes], ...]


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
            left = gate.calls_by_tenant[tenant] - 1
            if left:
                gate.calls_by_tenant[tenant] = left
            else:
                del gate.calls_by_tenant[tenant]
        gate.note_left()


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
        self._refusals = _Refusals()
        self.num_unsubmitted = 0
        self.calls_by_tenant: dict[str, int] = {}  # without zeros

    def enter(self, task: asyncio.Task[object]) -> GateSlot:
        """Return a place for the call of this task."""
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

    def refusal(self, request_id: str) -> tuple[Failure, Trailers]:
        """Return a shared refusal, and the trailers for this call."""
        return self._refusals.next(request_id, self._engines.estimated_wait, self._engines.capacity)


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
        """Return whether a call waits for a place."""
        return bool(self._waiting)

    @property
    def num_paused(self) -> int:
        """Return how many callers are paused."""
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
                self._forget_if_idle(sender)
            raise

    def give_back(self, sender: str) -> None:
        """Give the place of a call back."""
        self.num_free += 1
        left = self._taken[sender] - 1
        if left:
            self._taken[sender] = left
        else:
            del self._taken[sender]
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

    def _forget_if_idle(self, sender: str) -> None:
        if not self._waiting[sender]:
            del self._waiting[sender]


class _Refusals:
    """Trailers that are built once for many calls."""

    def __init__(self) -> None:
        self._made: list[tuple[Failure, bytes]] = []
        self._until = 0.0
        self._next = 0

    def next(self, request_id: str, wait: float, limit: float) -> tuple[Failure, Trailers]:
        now = time.monotonic()
        if now > self._until:
            self._until = now + _REFUSALS_AGE
            self._made = [_refusal(wait, limit) for _ in range(_REFUSALS)]
        self._next = (self._next + 1) % _REFUSALS
        made, details = self._made[self._next]
        assert made.retry_after is not None, "QueueFull has one"
        # Concatenated protobuf messages parse as one merged message.
        named = status_pb2.Status(details=[_packed(request_id)]).SerializeToString()
        return made, (
            ("grpc-status-details-bin", details + named),
            ("grpc-retry-pushback-ms", str(round(made.retry_after * 1000))),
        )


def _refusal(wait: float, limit: float) -> tuple[Failure, bytes]:
    error = QueueFull("too many requests wait", limit=limit)
    if wait > 0:
        error.metadata["retry_after_ms"] = str(round(wait * 1000))
    made = failure(error, "")
    nameless = status_pb2.Status()
    nameless.CopyFrom(made.status)
    kept = [each for each in nameless.details if each.TypeName() != _REQUEST_INFO]
    del nameless.details[:]
    nameless.details.extend(kept)
    return made, nameless.SerializeToString()


_REQUEST_INFO = error_details_pb2.RequestInfo.DESCRIPTOR.full_name


def _packed(request_id: str) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RequestInfo(request_id=request_id))
    return packed
