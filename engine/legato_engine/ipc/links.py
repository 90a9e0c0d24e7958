"""The engine's end of its links: many service processes, one engine.

Whoever knocks at the door that this process inherited is let in, at any time of its life.
`Links` belongs to the main thread.
"""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from legato_engine.core import WITH_BLOB, RequestKey
from legato_engine.errors import InvalidField, to_value
from legato_engine.ipc.busy_poll import EXPECTED_REQUEST
from legato_engine.ipc.framing import FrameReader, FrameWriter
from legato_engine.ipc.messages import (
    LAST,
    Abort,
    Command,
    DropImage,
    EngineOutput,
    Expect,
    Failed,
    HoldImage,
    Loading,
    Ready,
    Stop,
    StopElsewhere,
    Stopped,
    Submit,
    decode_command,
    encode,
)
from legato_engine.shm.blob_store import namespace_of

_EVENTS = 64  # seen at once; the others are seen next


@dataclasses.dataclass(slots=True, eq=False)
class _Link:
    """A service process; `open` are the ids of what it asked, and whether `Stop` ends that.

    `namespace` is that of its blobs, empty before the first.
    """

    connection: socket.socket
    incoming: FrameReader = dataclasses.field(default_factory=FrameReader)
    unsent: FrameWriter = dataclasses.field(default_factory=FrameWriter)
    open: dict[RequestKey, bool] = dataclasses.field(default_factory=dict)
    is_full: bool = False  # the kernel takes no more, and says when it does
    namespace: str = ""


class Links:
    """Everybody who asks this engine: commands come from all, a report goes to whom it concerns.

    Who hangs up has its open requests aborted, before anybody's newer commands, and `on_gone` is
    told the namespace of its blobs, if it sent any. Also woken by `wake_fd`, an eventfd of the
    caller's that is reset here.
    """

    def __init__(
        self,
        door: int,
        wake_fd: int,
        on_gone: Callable[[str], None] = lambda _: None,
        *,
        busy_poll: bool = True,
    ) -> None:
        self._door = inherited(door)
        self._wake_fd = wake_fd
        self._on_gone = on_gone
        self._busy_poll = busy_poll
        self._links: dict[int, _Link] = {}  # by descriptor
        self._owners: dict[RequestKey, _Link] = {}  # by id
        self._posted: set[_Link] = set()
        self._status: Loading | Ready | None = None
        self._events: list[tuple[int, int]] = []  # that `wait` saw
        self._alert_until = 0.0  # monotonic seconds; 0 where nobody tells requests ahead
        self._poller = select.epoll()
        self._poller.register(self._door, select.EPOLLIN)
        self._poller.register(wake_fd, select.EPOLLIN)

    def __len__(self) -> int:
        """Service processes that are linked."""
        return len(self._links)

    # ------------------------------------------------------------ commands

    def wait(self, timeout_ms: int | None) -> bool:
        """Block until a command is there, unsent reports can leave, or the time is up.

        Whether it was not the time.

        While a request is expected that is no sleep: to wake from one takes a lone request longer
        than all that is done with it before the device begins. Nor is it shortly behind the last
        answer, where requests are told ahead: who has it often asks again at once.
        """
        while not self._events and time.monotonic() < self._alert_until:
            self._events = self._poller.poll(0, _EVENTS)
        if not self._events:
            seconds = None if timeout_ms is None else timeout_ms / 1000
            self._events = self._poller.poll(seconds, _EVENTS)
        return bool(self._events)

    def receive(self) -> list[Command]:
        """The commands that are there now; those of a link that ended come first."""
        events, self._events = self._events or self._poller.poll(0, _EVENTS), []
        if len(events) > 1:
            events.sort(key=_hung_up, reverse=True)
        commands: list[Command] = []
        for fileno, event in events:
            link = self._links.get(fileno)
            if link is None:
                self._on_other(fileno)
                continue
            if event & select.EPOLLOUT:
                self._flush(link)
            if event & ~select.EPOLLOUT:
                commands += self._read(link, to_end=bool(event & select.EPOLLHUP))
        return commands

    def _on_other(self, fileno: int) -> None:
        if fileno == self._door.fileno():
            self._admit()
        elif fileno == self._wake_fd:
            os.eventfd_read(self._wake_fd)

    def _admit(self) -> None:
        """Let in all who knock, and tell them how things stand."""
        for connection in pending_connections(self._door):
            link = self._links[connection.fileno()] = _Link(connection)
            self._poller.register(connection, select.EPOLLIN)
            if self._status is not None:
                link.unsent.add(encode(self._status))
                self._flush(link)

    def _read(self, link: _Link, *, to_end: bool) -> list[Command]:
        """What one reading gives; of a link that ended, also the aborts of all that it leaves."""
        try:
            while link.incoming.read_from(link.connection) and to_end:
                pass
        except OSError:
            link.incoming.ended = True
        commands: list[Command] = []
        for frame in link.incoming.take():
            commands += self._checked(decode_command(frame), link)
        if link.incoming.ended:
            commands += [Abort(request_id=request_id) for request_id in link.open]
            self._forget(link)
        return commands

    def _checked(self, command: Command, link: _Link) -> Sequence[Command]:
        """What to do for it; no link takes over or ends what is another's."""
        match command:
            case Submit(request=request):
                if not link.namespace and isinstance(request.image, WITH_BLOB):
                    link.namespace = namespace_of(request.image.blob.name)
                return (command,) if self._claim(request.request_id, link, stops=True) else ()
            case HoldImage(request_id=request_id) | DropImage(request_id=request_id):
                return (command,) if self._claim(request_id, link, stops=False) else ()
            case Abort(request_id=request_id) | Stop(request_id=request_id):
                if self._owners.get(request_id) is not link:
                    return ()
                if isinstance(command, Abort):
                    self._release(request_id, link)
            case StopElsewhere():
                return self._elsewhere(command, link)
            case Expect():
                if self._busy_poll:
                    self._alert_until = time.monotonic() + EXPECTED_REQUEST
                return ()
        return (command,)

    def _elsewhere(self, command: StopElsewhere, asking: _Link) -> list[Command]:
        """A `Stop` for each; the answer counts what callers see as one request as one."""
        found = [
            each
            for each, owner in self._owners.items()
            if owner is not asking
            and owner.open[each]
            and (command.target is None or each.matches(command.target))
        ]
        count = len({each.call for each in found})
        asking.unsent.add(encode(Stopped(request_id=command.request_id, count=count)))
        self._posted.add(asking)
        return [Stop(request_id=each) for each in found]

    def _claim(self, request_id: RequestKey, link: _Link, *, stops: bool) -> bool:
        if request_id in self._owners:
            error = InvalidField("request id is in use", field="options.request_id")
            link.unsent.add(encode(Failed(request_id=request_id, error=to_value(error))))
            self._posted.add(link)
            return False
        self._owners[request_id] = link
        link.open[request_id] = stops
        return True

    def _release(self, request_id: RequestKey, link: _Link) -> None:
        del self._owners[request_id]
        del link.open[request_id]

    def _forget(self, link: _Link) -> None:
        for request_id in link.open:
            del self._owners[request_id]
        del self._links[link.connection.fileno()]
        self._poller.unregister(link.connection)
        link.connection.close()
        self._posted.discard(link)
        if link.namespace:
            self._on_gone(link.namespace)

    # ------------------------------------------------------------ reports

    def broadcast(self, status: Loading | Ready) -> None:
        """Tell all, and whoever comes later until the next such report."""
        self._status = status
        frame = encode(status)
        for link in self._links.values():
            link.unsent.add(frame)
            self._flush(link)
        self._admit()

    def post(self, report: EngineOutput) -> None:
        """Keep a report until the next `flush`; dropped when nobody is there for it."""
        link = self._owners.get(report.request_id)
        if link is None:
            return
        if isinstance(report, LAST):
            self._release(report.request_id, link)
            if self._alert_until and not self._owners:
                self._alert_until = time.monotonic() + EXPECTED_REQUEST
        link.unsent.add(encode(report))
        self._posted.add(link)

    def send(self, report: EngineOutput) -> None:
        """Send a report at once, behind those that were posted for the same link; never blocks."""
        link = self._owners.get(report.request_id)
        if link is not None:
            self.post(report)
            self._flush(link)

    def flush(self) -> None:
        """Send what was posted, as far as the kernel takes it; `receive` goes on with the rest."""
        for link in self._posted:
            if not link.is_full:
                self._flush(link)
        self._posted.clear()

    def close(self, linger_ms: int) -> None:
        """Hang up on all, giving what is unsent `linger_ms` to leave."""
        self.flush()
        until = time.monotonic() + linger_ms / 1000
        while (left := until - time.monotonic()) > 0:
            full = [link for link in self._links.values() if link.is_full]
            if not full:
                break
            select.select((), [link.connection for link in full], (), left)
            for link in full:
                self._flush(link)
        for link in self._links.values():
            link.connection.close()
        self._links.clear()
        self._owners.clear()
        self._poller.close()
        self._door.close()

    def _flush(self, link: _Link) -> None:
        """A link that is gone takes everything; that it is gone is noticed by reading."""
        try:
            is_full = not link.unsent.write_to(link.connection)
        except OSError:
            link.unsent.clear()
            is_full = False
        if is_full != link.is_full:
            link.is_full = is_full
            wanted = select.EPOLLIN | (select.EPOLLOUT if is_full else 0)
            self._poller.modify(link.connection, wanted)


def _hung_up(event: tuple[int, int]) -> bool:
    return bool(event[1] & select.EPOLLHUP)


def inherited(door: int) -> socket.socket:
    """A listening socket by its descriptor; it stays open for whoever gave it."""
    return socket.socket(fileno=os.dup(door))


def pending_connections(door: socket.socket) -> Iterator[socket.socket]:
    """Those who wait at a listening non-blocking socket, let in."""
    while True:
        try:
            connection, _ = door.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        yield connection
