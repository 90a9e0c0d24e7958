"""Connections of the engine to the service processes: many service processes, one engine."""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from legato_engine import failpoints
from legato_engine.errors import InvalidField, to_value
from legato_engine.ipc.framing import FrameReader, FrameWriter
from legato_engine.ipc.latency_policy import EXPECTED_REQUEST
from legato_engine.ipc.messages import (
    FINAL,
    Abort,
    Command,
    DropImage,
    EngineOutput,
    Expect,
    Failed,
    Heartbeat,
    HoldImage,
    Loading,
    Ready,
    RunningAlone,
    Stop,
    StopElsewhere,
    StoppedCalls,
    Submit,
    TimelineBatch,
    WatchTimeline,
    decode_command,
    encode,
)
from legato_engine.shm import namespace_of
from legato_engine.types import RequestKey


class Subscribers:
    """Connections of the service processes; belongs to the heartbeat thread."""

    def __init__(self, listener_fd: int) -> None:
        self._listener = inherited_listener(listener_fd)
        self._connections: dict[socket.socket, FrameWriter] = {}

    def send(self, beat: Heartbeat) -> None:
        """Send to all, new connections included, without unread heartbeats."""
        for connection in pending_connections(self._listener):
            self._connections[connection] = FrameWriter()
        frame = encode(beat)
        for connection, unsent in list(self._connections.items()):
            try:
                if unsent.write_to(connection):
                    unsent.add(frame)
                    unsent.write_to(connection)
            except OSError:
                del self._connections[connection]
                connection.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when a connection is pending."""
        return self._listener.fileno()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._listener.close()


# ---------------------------------------------------------------- service connections

_MAX_EVENTS = 64
_MAX_WAIT_MS = 24 * 3600 * 1000  # epoll takes at most 2^31 - 1, a deadline may be years away


@dataclasses.dataclass(slots=True, eq=False)
class _ServiceConnection:
    """The connection of one service process."""

    socket: socket.socket
    incoming: FrameReader = dataclasses.field(default_factory=FrameReader)
    unsent: FrameWriter = dataclasses.field(default_factory=FrameWriter)
    open: dict[RequestKey, bool] = dataclasses.field(default_factory=dict)
    """The open requests of the process, and whether `Stop` ends each."""

    is_full: bool = False  # EPOLLOUT is awaited
    namespace: str = ""  # of its blobs; empty before the first


class ServiceConnections:
    """Connections of all service processes. Belongs to the main thread.

    When a process disconnects, its open requests are aborted before newer commands of the others,
    and `on_disconnect` gets the namespace of its blobs, if it sent any.
    """

    def __init__(
        self,
        listener_fd: int,
        wake_fd: int,
        on_disconnect: Callable[[str], None] = lambda _: None,
        *,
        busy_poll: bool = True,
    ) -> None:
        self._listener = inherited_listener(listener_fd)
        self._wake_fd = wake_fd
        self._on_disconnect = on_disconnect
        self._busy_poll = busy_poll
        self._connections: dict[int, _ServiceConnection] = {}
        self._owners: dict[RequestKey, _ServiceConnection] = {}
        self._posted: set[_ServiceConnection] = set()
        self._watching: set[_ServiceConnection] = set()
        self._status: Loading | Ready | None = None
        self._alone = b""  # frame of the current `RunningAlone`
        self._events: list[tuple[int, int]] = []
        self._poll_until = 0.0  # monotonic seconds; 0 before the first `Expect`
        self._poller = select.epoll()
        self._poller.register(self._listener, select.EPOLLIN)
        self._poller.register(wake_fd, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._connections)

    # ------------------------------------------------------------ commands

    def wait(self, timeout_ms: int | None) -> bool:
        """Block until there are commands, room in a full socket, or a write to `wake_fd`.

        Return False when the time is up first, or after a day. Poll while a request is expected,
        because waking up takes longer than all host work of a lone request before the device
        begins; and briefly after the last result.
        """
        while not self._events and time.monotonic() < self._poll_until:
            self._events = self._poller.poll(0, _MAX_EVENTS)
        if not self._events:
            seconds = None if timeout_ms is None else min(timeout_ms, _MAX_WAIT_MS) / 1000
            self._events = self._poller.poll(seconds, _MAX_EVENTS)
        return bool(self._events)

    def pause(self, seconds: float) -> bool:
        """Block as `wait` does, but without polling, and for fractions of a millisecond."""
        if not self._events and select.select((self._poller,), (), (), seconds)[0]:
            self._events = self._poller.poll(0, _MAX_EVENTS)
        return bool(self._events)

    def receive(self) -> list[Command]:
        events, self._events = self._events or self._poller.poll(0, _MAX_EVENTS), []
        if len(events) > 1:
            events.sort(key=_is_hang_up, reverse=True)
        commands: list[Command] = []
        for fileno, event in events:
            connection = self._connections.get(fileno)
            if connection is None:
                self._on_other(fileno)
                continue
            if event & select.EPOLLOUT:
                self._flush(connection)
            if event & ~select.EPOLLOUT:
                commands += self._read(connection, to_end=bool(event & select.EPOLLHUP))
        return commands

    def _on_other(self, fileno: int) -> None:
        if fileno == self._listener.fileno():
            self._accept()
        elif fileno == self._wake_fd:
            os.eventfd_read(self._wake_fd)

    def _accept(self) -> None:
        for accepted in pending_connections(self._listener):
            connection = self._connections[accepted.fileno()] = _ServiceConnection(accepted)
            self._poller.register(accepted, select.EPOLLIN)
            if self._status is not None:
                connection.unsent.add(encode(self._status))
                if self._alone:
                    connection.unsent.add(self._alone)
                self._flush(connection)

    def _read(self, connection: _ServiceConnection, *, to_end: bool) -> list[Command]:
        try:
            while connection.incoming.read_from(connection.socket) and to_end:
                pass
        except OSError:
            connection.incoming.ended = True
        commands: list[Command] = []
        for frame in connection.incoming.take():
            commands += self._checked(decode_command(frame), connection)
        if connection.incoming.ended:
            commands += [Abort(request_id=key) for key in connection.open]
            self._forget(connection)
        return commands

    def _checked(self, command: Command, connection: _ServiceConnection) -> Sequence[Command]:
        """Return the commands without those that target another process's request."""
        match command:
            case Submit(request=request):
                if not connection.namespace and (blobs := request.blobs):
                    connection.namespace = namespace_of(blobs[0].name)
                return (command,) if self._claim(request.request_id, connection, stops=True) else ()
            case HoldImage(request_id=key) | DropImage(request_id=key):
                return (command,) if self._claim(key, connection, stops=False) else ()
            case Abort(request_id=key) | Stop(request_id=key):
                if self._owners.get(key) is not connection:
                    return ()
                if isinstance(command, Abort):
                    self._release(key, connection)
            case StopElsewhere():
                return self._stop_elsewhere(command, connection)
            case Expect() | WatchTimeline():
                self._note(command, connection)
                return ()
        return (command,)

    def _note(self, command: Expect | WatchTimeline, sender: _ServiceConnection) -> None:
        if isinstance(command, WatchTimeline):
            (self._watching.add if command.watching else self._watching.discard)(sender)
        elif self._busy_poll:
            self._poll_until = time.monotonic() + EXPECTED_REQUEST

    def _stop_elsewhere(self, command: StopElsewhere, sender: _ServiceConnection) -> list[Command]:
        found = [
            key
            for key, owner in self._owners.items()
            if owner is not sender
            and owner.open[key]
            and (command.target is None or key.matches(command.target))
        ]
        count = len({key.call for key in found})
        sender.unsent.add(encode(StoppedCalls(request_id=command.request_id, count=count)))
        self._posted.add(sender)
        return [Stop(request_id=key) for key in found]

    def _claim(self, key: RequestKey, connection: _ServiceConnection, *, stops: bool) -> bool:
        if key in self._owners:
            error = InvalidField("request id is in use", field="options.request_id")
            connection.unsent.add(encode(Failed(request_id=key, error=to_value(error))))
            self._posted.add(connection)
            return False
        self._owners[key] = connection
        connection.open[key] = stops
        return True

    def _release(self, key: RequestKey, connection: _ServiceConnection) -> None:
        del self._owners[key]
        del connection.open[key]

    def _forget(self, connection: _ServiceConnection) -> None:
        for key in connection.open:
            del self._owners[key]
        del self._connections[connection.socket.fileno()]
        self._poller.unregister(connection.socket)
        connection.socket.close()
        self._posted.discard(connection)
        self._watching.discard(connection)
        if connection.namespace:
            self._on_disconnect(connection.namespace)

    # ------------------------------------------------------------ outputs

    def broadcast(self, status: Loading | Ready) -> None:
        """Send a status to all current and later connections."""
        self._status = status
        frame = encode(status)
        for connection in self._connections.values():
            connection.unsent.add(frame)
            self._flush(connection)
        self._accept()

    def announce(self, alone: RunningAlone) -> None:
        """Send `RunningAlone` to all connections, and to later ones while it is true."""
        frame = encode(alone)
        self._alone = b"" if alone.request_id is None else frame
        for connection in self._connections.values():
            connection.unsent.add(frame)
            self._flush(connection)

    def post(self, output: EngineOutput) -> None:
        """Keep an output until the next `flush`; drop it when its process is gone."""
        connection = self._owners.get(output.request_id)
        if connection is None:
            return
        if isinstance(output, FINAL):
            self._release(output.request_id, connection)
            if self._poll_until and not self._owners:
                self._poll_until = time.monotonic() + EXPECTED_REQUEST
        connection.unsent.add(encode(output))
        self._posted.add(connection)

    def send(self, output: EngineOutput) -> None:
        """Send an output at once, after those posted for the same process; never blocks."""
        connection = self._owners.get(output.request_id)
        if connection is not None:
            self.post(output)
            self._flush(connection)

    @property
    def watched(self) -> bool:
        return bool(self._watching)

    def send_timeline(self, batch: TimelineBatch) -> None:
        """Send to the processes that watch, without those that read too slowly."""
        frame = encode(batch)
        for connection in self._watching:
            if not connection.is_full:
                connection.unsent.add(frame)
                self._flush(connection)

    def flush(self) -> None:
        """Send what the sockets take; `receive` sends the remainder."""
        for connection in self._posted:
            if not connection.is_full:
                self._flush(connection)
        self._posted.clear()

    def close(self, linger_ms: int) -> None:
        """Close all connections after `linger_ms` at most for unsent outputs."""
        self.flush()
        until = time.monotonic() + linger_ms / 1000
        while (left := until - time.monotonic()) > 0:
            full = [each for each in self._connections.values() if each.is_full]
            if not full:
                break
            select.select((), [each.socket for each in full], (), left)
            for connection in full:
                self._flush(connection)
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._owners.clear()
        self._poller.close()
        self._listener.close()

    def _flush(self, connection: _ServiceConnection) -> None:
        """Write to a connection; a broken one drops its outputs, and reading detects the end."""
        failpoints.hit("ipc.send")
        try:
            is_full = not connection.unsent.write_to(connection.socket)
        except OSError:
            connection.unsent.clear()
            is_full = False
        if is_full != connection.is_full:
            connection.is_full = is_full
            wanted = select.EPOLLIN | (select.EPOLLOUT if is_full else 0)
            self._poller.modify(connection.socket, wanted)


def _is_hang_up(event: tuple[int, int]) -> bool:
    return bool(event[1] & select.EPOLLHUP)


def inherited_listener(descriptor: int) -> socket.socket:
    """Open an inherited listening socket; closing it leaves the other processes' open."""
    return socket.socket(fileno=os.dup(descriptor))


def pending_connections(listener: socket.socket) -> Iterator[socket.socket]:
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        yield connection
