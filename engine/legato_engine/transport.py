"""One-way sockets between the service and one incarnation of the engine process.

They live in a private folder that goes with the link. The service listens and the engine connects:
once for commands, and once per thread that reports. Each message is its length and its bytes.

Who sends writes to the kernel itself, without a thread between, so that a message costs the wake-up
of its reader and nothing else. Queues are unbounded on purpose: a bound would drop a report or
block a scheduler tick, and what can pile up is bounded by admission already.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable

from legato_engine.frames import FrameReader, FrameWriter
from legato_engine.messages import Command, Report, decode_command, decode_report, encode

_READS_PER_TURN = 16  # then other callbacks of the event loop get their turn
_COMMANDS, _REPORTS = "commands", "reports"


class ServiceLink:
    """The service's end, driven by a running asyncio loop."""

    def __init__(self, on_report: Callable[[Report], None]) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="legato-"))  # mkdtemp makes it 0700
        self.endpoint = str(self._folder)
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._unsent = FrameWriter()  # what is to leave before and between the engine's readings
        self._engine: socket.socket | None = None
        self._flush_due = False
        self._reporters: dict[socket.socket, FrameReader] = {}
        self._listeners = (
            self._listen(_COMMANDS, self._take_commands),
            self._listen(_REPORTS, self._take_reports),
        )
        self._closed = False

    def send(self, command: Command) -> None:
        """Enqueue a command; never blocks. Those of one turn of the loop leave together."""
        if self._closed:
            return
        self._unsent.add(encode(command))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Deliver reports that already arrived, then close the sockets and remove the folder."""
        if self._closed:
            return
        self._take_reports(self._listeners[1])
        for reporter in list(self._reporters):
            while self._read(reporter):
                pass
        self._closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for reporter in list(self._reporters):
            self._hang_up(reporter)
        self._drop_engine()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self, name: str, accept: Callable[[socket.socket], None]) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(self._folder / name))
        listener.listen()
        self._loop.add_reader(listener, accept, listener)
        return listener

    # ------------------------------------------------------------ commands

    def _take_commands(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            engine, _ = listener.accept()
            engine.setblocking(False)
            self._engine = engine
            self._flush()

    def _flush(self) -> None:
        """Send what the kernel takes, and the rest when it says that it takes more."""
        self._flush_due = False
        if self._engine is None:
            return
        try:
            sent = self._unsent.write_to(self._engine)
        except OSError:  # the engine is gone; its end is noticed elsewhere
            self._drop_engine()
            return
        if sent:
            self._loop.remove_writer(self._engine)
        else:
            self._loop.add_writer(self._engine, self._flush)

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._loop.remove_writer(self._engine)
            self._engine.close()
            self._engine = None

    # ------------------------------------------------------------ reports

    def _take_reports(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                reporter, _ = listener.accept()
                reporter.setblocking(False)
                self._reporters[reporter] = FrameReader()
                self._loop.add_reader(reporter, self._drain, reporter)

    def _drain(self, reporter: socket.socket) -> None:
        """The loop calls again while there is more."""
        for _ in range(_READS_PER_TURN):
            if not self._read(reporter):
                return

    def _read(self, reporter: socket.socket) -> bool:
        """Deliver what one reading gives; whether that was anything."""
        frames = self._reporters.get(reporter)
        if frames is None:
            return False
        try:
            came = frames.read_from(reporter)
        except OSError:
            self._hang_up(reporter)
            return False
        for frame in frames.take():
            self._on_report(decode_report(frame))
        if frames.ended:
            self._hang_up(reporter)
        return came

    def _hang_up(self, reporter: socket.socket) -> None:
        if self._reporters.pop(reporter, None) is not None:
            self._loop.remove_reader(reporter)
            reporter.close()


class ReportSender:
    """An engine thread's own sending end; each thread that reports has one."""

    def __init__(self, endpoint: str) -> None:
        self._socket = _connect(endpoint, _REPORTS)
        self._unsent = FrameWriter()

    def post(self, report: Report) -> None:
        """Keep a report until the next `flush`, which sends all that were kept at once."""
        self._unsent.add(encode(report))

    def flush(self) -> bool:
        """Send what the kernel takes without waiting; whether that was everything.

        A service that is gone takes everything: the end of the parent ends this process elsewhere.
        """
        try:
            return self._unsent.write_to(self._socket)
        except OSError:
            self._unsent.clear()
            return True

    def send(self, report: Report) -> None:
        """Enqueue a report behind those that were posted; never blocks."""
        self.post(report)
        self.flush()

    def close(self, linger_ms: int) -> None:
        """Close, giving what is queued `linger_ms` to leave."""
        until = time.monotonic() + linger_ms / 1000
        while not self.flush() and (left := until - time.monotonic()) > 0:
            select.select((), (self._socket,), (), left)
        self._socket.close()

    def fileno(self) -> int:
        """For a poller that waits until more can be sent."""
        return self._socket.fileno()


class CommandReceiver:
    """The engine's receiving end; also woken by a file descriptor of the caller's."""

    def __init__(self, endpoint: str, wake_fd: int) -> None:
        self._socket = _connect(endpoint, _COMMANDS)
        self._frames = FrameReader()
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._poller.register(wake_fd, select.POLLIN)

    def wait(self, timeout_ms: int | None, unsent: ReportSender | None = None) -> None:
        """Block until a command is there, the descriptor is readable, or the time is up.

        Also until `unsent`, whose queue is not empty, can send.
        """
        if unsent is not None:
            self._poller.register(unsent, select.POLLOUT)
        self._poller.poll(timeout_ms)
        if unsent is not None:
            self._poller.unregister(unsent)

    def receive(self) -> list[Command]:
        """All commands that are there now."""
        try:
            while self._frames.read_from(self._socket):
                pass
        except OSError:
            self._frames.ended = True
        if self._frames.ended:  # a service that is gone wakes nobody; the heartbeat finds out
            self._forget_service()
        return [decode_command(frame) for frame in self._frames.take()]

    def close(self) -> None:
        """Close the socket; what is still queued is dropped."""
        self._socket.close()

    def _forget_service(self) -> None:
        with contextlib.suppress(KeyError):
            self._poller.unregister(self._socket)


def _connect(endpoint: str, name: str) -> socket.socket:
    """A connection to the service, which listens before it starts an engine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"{endpoint}/{name}")
    connection.setblocking(False)
    return connection
