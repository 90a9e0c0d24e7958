"""Sockets between the service processes and the engine process, as the service uses them.

Each service process has two connections to the engine: `requests` carries commands to the engine
and its outputs back, `vitals` carries heartbeats. The first service process owns the listening
sockets, and every engine inherits them: a connection made while no engine runs waits for the next.
The engine's end is in `service_connections`.

Senders write to the kernel themselves, without a thread between, so that a message costs no more
than its reader's wake-up. Queues are unbounded, because a bound would drop an output or block a
step of the engine; admission control bounds what can accumulate.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Callable

from legato_engine.ipc.framing import FrameReader, FrameWriter
from legato_engine.ipc.messages import Command, EngineMessage, decode_engine_message, encode
from legato_engine.ipc.service_connections import pending_connections

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
        """The descriptors that an engine inherits: of `requests`, then of `vitals`."""
        return tuple(each.fileno() for each in self._sockets)

    def reject_pending(self) -> None:
        """Close the connections that wait while there is no engine, dead ones among them.

        Live processes reconnect when `requests` is closed. They connect to `requests` first, so the
        sockets are emptied in reverse order: none keeps `requests` and loses `vitals`.
        """
        for listener in reversed(self._sockets):
            for connection in pending_connections(listener):
                connection.close()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for each in self._sockets:
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(self._folder / name))
        listener.listen(_BACKLOG)
        return listener


class EngineTransport:
    """A service process's two connections to one engine, driven by the running asyncio loop.

    `on_end` is called once, after the engine has closed `requests` and all its messages were
    delivered; not after `close`.
    """

    def __init__(
        self, endpoint: str, on_message: Callable[[EngineMessage], None], on_end: Callable[[], None]
    ) -> None:
        """Connect.

        Raises:
            OSError: nothing listens at `endpoint`.
        """
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._unsent = FrameWriter()
        self._flush_due = False
        self._is_full = False  # the socket is full; the loop calls `_write` when it is not
        self._requests = _connect(endpoint, _REQUESTS)
        self._incoming = {
            self._requests: FrameReader(),
            _connect(endpoint, _VITALS): FrameReader(),
        }
        for connection in self._incoming:
            self._loop.add_reader(connection, self._drain, connection)
        self._closed = False

    def send(self, command: Command, *, at_once: bool = False) -> None:
        """Enqueue a command; never blocks. Commands of one turn of the loop are sent together.

        `at_once` sends it now, with all commands before it.
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
        """Deliver messages that have arrived, then disconnect. Idempotent.

        Commands are sent as far as the sockets take them now.
        """
        if self._closed:
            return
        self._flush()
        self._closed = True
        for connection in list(self._incoming):
            while self._read(connection):
                pass
            self._disconnect(connection)

    def _flush(self) -> None:
        self._flush_due = False
        self._write()

    def _write(self) -> None:
        if self._requests not in self._incoming:  # disconnected
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
        # The loop calls again while there is more, which costs less than another `recv` here.
        frames = self._incoming.get(connection)
        for _ in range(_READS_PER_TURN):
            if frames is None or not (self._read(connection) and frames.more):
                return

    def _read(self, connection: socket.socket) -> bool:
        frames = self._incoming.get(connection)
        if frames is None:
            return False
        try:
            received = frames.read_from(connection)
        except OSError:
            received, frames.ended = False, True
        for frame in frames.take():
            self._on_message(decode_engine_message(frame))
        if frames.ended:
            self._on_closed(connection)
        return received

    def _on_closed(self, connection: socket.socket) -> None:
        self._disconnect(connection)
        if connection is self._requests and not self._closed:
            self.close()
            self._on_end()

    def _disconnect(self, connection: socket.socket) -> None:
        if self._incoming.pop(connection, None) is not None:
            self._loop.remove_reader(connection)
            self._loop.remove_writer(connection)
            connection.close()


def _connect(endpoint: str, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"{endpoint}/{name}")
    except OSError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection
