"""Two one-way sockets between the service and one incarnation of the engine process.

Both live in a private folder that goes with the link. The receiver binds and the sender connects,
so that nothing is lost that is sent before the other end is there. Queues are unbounded on purpose:
a bound would drop a report or block a scheduler tick, and what can pile up is bounded by admission
already.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import zmq

from legato_engine.messages import Command, Report, decode_command, decode_report, encode

_REPORTS_PER_TURN = 256  # then other callbacks of the event loop get their turn
_RECONNECT_MS = 5


class ServiceLink:
    """The service's end, driven by a running asyncio loop."""

    def __init__(self, on_report: Callable[[Report], None]) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="legato-"))  # mkdtemp makes it 0700
        self.endpoint = f"ipc://{self._folder}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._commands = _socket(self._context, zmq.PUSH)
        self._reports = _socket(self._context, zmq.PULL)
        self._commands.connect(f"{self.endpoint}/commands")
        self._reports.bind(f"{self.endpoint}/reports")
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reports.fileno(), self._drain)
        self._closed = False
        self._drain()

    def send(self, command: Command) -> None:
        """Enqueue a command; never blocks."""
        self._commands.send(encode(command))

    def close(self) -> None:
        """Deliver reports that already arrived, then close the sockets and remove the folder."""
        if self._closed:
            return
        while self._receive_one():
            pass
        self._closed = True
        self._loop.remove_reader(self._reports.fileno())
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drain(self) -> None:
        """The socket's descriptor signals edges only: read on until there is nothing left."""
        for _ in range(_REPORTS_PER_TURN):
            if not self._receive_one():
                return
        self._loop.call_soon(self._drain)

    def _receive_one(self) -> bool:
        if self._closed:
            return False
        try:
            data = self._reports.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._on_report(decode_report(data))
        return True


class ReportSender:
    """An engine thread's own sending end; each thread that reports has one."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = _socket(self._context, zmq.PUSH)
        self._socket.connect(f"{endpoint}/reports")

    def send(self, report: Report) -> None:
        """Enqueue a report."""
        self._socket.send(encode(report))

    def close(self, linger_ms: int) -> None:
        """Close, giving what is queued `linger_ms` to leave."""
        self._context.destroy(linger=linger_ms)


class CommandReceiver:
    """The engine's receiving end; also woken by a file descriptor of the caller's."""

    def __init__(self, endpoint: str, wake_fd: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = _socket(self._context, zmq.PULL)
        self._socket.bind(f"{endpoint}/commands")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)

    def wait(self, timeout_ms: int | None) -> None:
        """Block until a command is there, the descriptor is readable, or the time is up."""
        self._poller.poll(timeout_ms)

    def receive(self) -> list[Command]:
        """All commands that are there now."""
        commands: list[Command] = []
        with contextlib.suppress(zmq.Again):
            while True:
                commands.append(decode_command(self._socket.recv(zmq.NOBLOCK)))
        return commands

    def close(self) -> None:
        """Close the socket; what is still queued is dropped."""
        self._context.destroy(linger=0)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[Any]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    socket.reconnect_ivl = _RECONNECT_MS
    return socket
