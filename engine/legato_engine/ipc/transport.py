"""Sockets to the engine process, as the service processes use them.

`requests` carries commands and outputs, `vitals` heartbeats. The first service process owns the
listening sockets, and every engine inherits them: a connection made while no engine runs waits for
the next.

Senders write to the kernel themselves, so that a message costs no more than its reader's wake-up.
Queues are unbounded, because a bound would drop an output or block a step of the engine; admission
control bounds what can accumulate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import shutil
import socket
import tempfile
from collections.abc import Callable

from legato_engine.errors import InvalidField
from legato_engine.ipc.framing import FrameReader, FrameWriter
from legato_engine.ipc.messages import Command, EngineMessage, decode_engine_message, encode
from legato_engine.ipc.service_connections import pending_connections
from legato_engine.shm import OwnerLock, sweep_folders

_READS_PER_TURN = 16  # then other callbacks run
_REQUESTS, _VITALS = "requests", "vitals"
_BACKLOG = 128


_PREFIX = "legato-"
_FOLDER_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as `mkdtemp` makes it
_LOCK_NAME = "lock"
_MAX_PATH = 107  # bytes of a Unix socket's path


def _unusable(parent: pathlib.Path, error: OSError) -> str:
    most = _MAX_PATH - len(f"/{_PREFIX}12345678/{_REQUESTS}")
    length = len(os.fsencode(parent))
    if length > most:
        return (
            f"the temporary folder {parent} has a path of {length} bytes, and the engine's sockets "
            f"in it can be reached with {most} at most; set TMPDIR to a shorter one"
        )
    return f"the temporary folder {parent} takes no sockets: {error.strerror or error}"


class ListeningSockets:
    """Pair of listening sockets, in a private folder that `close` removes."""

    def __init__(self) -> None:
        """Listen.

        Raises:
            InvalidField: the temporary folder takes no sockets.
        """
        parent = pathlib.Path(tempfile.gettempdir())
        try:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
            self._lock = OwnerLock(self._folder / _LOCK_NAME)
            self._sockets = self._listening()
        except OSError as error:
            raise InvalidField(_unusable(parent, error), field="TMPDIR") from None
        self.endpoint = str(self._folder)

    @property
    def filenos(self) -> tuple[int, ...]:
        """Return the descriptors that an engine inherits: of `requests`, then of `vitals`."""
        return tuple(each.fileno() for each in self._sockets)

    def reject_pending(self) -> None:
        """Close the connections that wait while there is no engine.

        Live processes reconnect when `requests` is closed. They connect to it first, so the sockets
        are emptied in reverse order: none keeps `requests` and loses `vitals`.
        """
        for listener in reversed(self._sockets):
            for connection in pending_connections(listener):
                connection.close()

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.release()

    @staticmethod
    def sweep() -> int:
        """Remove the folders of dead service processes; return how many."""
        parent = pathlib.Path(tempfile.gettempdir())
        return sweep_folders(parent, _FOLDER_NAME, _LOCK_NAME, (_REQUESTS, _VITALS))

    def _listening(self) -> tuple[socket.socket, ...]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.release)
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            sockets = []
            for name in (_REQUESTS, _VITALS):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                sockets.append(undo.enter_context(listener))
                listener.bind(str(self._folder / name))
                listener.listen(_BACKLOG)
            undo.pop_all()
        return tuple(sockets)


class EngineTransport:
    """Pair of connections to one engine, driven by the running asyncio loop.

    `on_end` is called once, after the engine has closed `requests` and all its messages were
    delivered; not after `close`.
    """

    def __init__(
        self, endpoint: str, on_message: Callable[[EngineMessage], None], on_end: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._unsent = FrameWriter()
        self._flush_due = False
        self._is_full = False  # if so, the loop calls `_write` when there is room
        self._requests = _connect(endpoint, _REQUESTS)
        self._incoming = {
            self._requests: FrameReader(),
            _connect(endpoint, _VITALS): FrameReader(),
        }
        for connection in self._incoming:
            self._loop.add_reader(connection, self._drain, connection)
        self._closed = False

    def send(self, command: Command, *, at_once: bool = False) -> None:
        """Enqueue a command without blocking; commands of one loop iteration are sent together.

        With `at_once`, send all now.
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
        """Deliver messages that have arrived, then disconnect. Idempotent."""
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
        except OSError:  # the engine is gone; reading detects it
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
