"""How service processes reach the engine process: where they knock, and their end of a link.

Each service process holds two connections to the engine: `requests` carries commands there and the
reports of these commands back, `vitals` carries heartbeats. The doors belong to the process that
runs the engines, and every engine inherits them: who knocks between two engines waits for the next.
The engine's end is in `links`.

Who sends writes to the kernel itself, without a thread between, so that a message costs the wake-up
of its reader and nothing else. Queues are unbounded on purpose: a bound would drop a report or
block a scheduler tick, and what can pile up is bounded by admission already.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Callable

from legato_engine.ipc.framing import FrameReader, FrameWriter
from legato_engine.ipc.links import pending_connections
from legato_engine.ipc.messages import Command, Report, decode_report, encode

_READS_PER_TURN = 16  # then other callbacks of the event loop get their turn
_REQUESTS, _VITALS = "requests", "vitals"
_BACKLOG = 128  # connections that may wait for the next engine


class ListeningSockets:
    """The two listening sockets, in a private folder that `close` removes."""

    def __init__(self) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="legato-"))  # mkdtemp makes it 0700
        self.endpoint = str(self._folder)
        self._sockets = tuple(self._listen(name) for name in (_REQUESTS, _VITALS))

    @property
    def filenos(self) -> tuple[int, ...]:
        """What an engine inherits: the door for requests, then the one for vitals."""
        return tuple(each.fileno() for each in self._sockets)

    def turn_away(self) -> None:
        """For when there is no engine: hang up on all who wait, so that the dead do not pile up.

        Who lives knocks again, at the end of its requests. So the doors are gone through against
        the order in which they are knocked at: nobody loses vitals and keeps requests.
        """
        for door in reversed(self._sockets):
            for waiting in pending_connections(door):
                waiting.close()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        for each in self._sockets:
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(self._folder / name))
        listener.listen(_BACKLOG)
        return listener


class EngineLink:
    """A service process's end of its link to one engine, driven by a running asyncio loop.

    `on_end` is called once, when the engine hung up and all that it had said was delivered; not
    after `close`.
    """

    def __init__(
        self, endpoint: str, on_report: Callable[[Report], None], on_end: Callable[[], None]
    ) -> None:
        self._on_report = on_report
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._unsent = FrameWriter()
        self._flush_due = False
        self._is_full = False  # the kernel takes no more, and says when it does
        self._requests = _connect(endpoint, _REQUESTS)
        self._incoming = {
            self._requests: FrameReader(),
            _connect(endpoint, _VITALS): FrameReader(),
        }
        for connection in self._incoming:
            self._loop.add_reader(connection, self._drain, connection)
        self._closed = False

    def send(self, command: Command, *, at_once: bool = False) -> None:
        """Enqueue a command; never blocks. Those of one turn of the loop leave together.

        With `at_once` it leaves now, with all before it: for one that no other will follow.
        """
        if self._closed:
            return
        self._unsent.add(encode(command))
        if at_once:
            self._write()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Deliver reports that already arrived, then hang up. Idempotent.

        Commands leave as far as the engine takes them now.
        """
        if self._closed:
            return
        self._flush()
        self._closed = True
        for connection in list(self._incoming):
            while self._read(connection):
                pass
            self._hang_up(connection)

    def _flush(self) -> None:
        self._flush_due = False
        self._write()

    def _write(self) -> None:
        """Send what the kernel takes, and the rest when it says that it takes more."""
        if self._requests not in self._incoming:  # hung up on
            return
        try:
            is_full = not self._unsent.write_to(self._requests)
        except OSError:  # the engine is gone, which reading notices
            self._unsent.clear()
            is_full = False
        if is_full == self._is_full:
            return
        self._is_full = is_full
        if is_full:
            self._loop.add_writer(self._requests, self._write)
        else:
            self._loop.remove_writer(self._requests)

    def _drain(self, connection: socket.socket) -> None:
        """The loop calls again while there is more, which costs less than asking whether."""
        frames = self._incoming.get(connection)
        for _ in range(_READS_PER_TURN):
            if frames is None or not (self._read(connection) and frames.more):
                return

    def _read(self, connection: socket.socket) -> bool:
        """Deliver what one reading gives; whether that was anything."""
        frames = self._incoming.get(connection)
        if frames is None:
            return False
        try:
            came = frames.read_from(connection)
        except OSError:
            came, frames.ended = False, True
        for frame in frames.take():
            self._on_report(decode_report(frame))
        if frames.ended:
            self._on_hang_up(connection)
        return came

    def _on_hang_up(self, connection: socket.socket) -> None:
        self._hang_up(connection)
        if connection is self._requests and not self._closed:
            self.close()
            self._on_end()

    def _hang_up(self, connection: socket.socket) -> None:
        if self._incoming.pop(connection, None) is not None:
            self._loop.remove_reader(connection)
            self._loop.remove_writer(connection)
            connection.close()


def _connect(endpoint: str, name: str) -> socket.socket:
    """A connection to a door; raises `OSError` when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"{endpoint}/{name}")
    except OSError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection
