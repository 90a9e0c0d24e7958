"""The service processes that receive this engine's heartbeats."""

from __future__ import annotations

import enum
import select
import socket

from legato_engine.ipc.codec import encode
from legato_engine.ipc.framing import FrameWriter
from legato_engine.ipc.messages import Heartbeat
from legato_engine.ipc.service_connections import inherited_listener, pending_connections


class WakeReason(enum.Enum):
    """What ended a wait."""

    STOP = enum.auto()
    CONNECTION = enum.auto()
    TIMEOUT = enum.auto()


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

    def wait(self, stop_fd: int, seconds: float) -> WakeReason:
        listener_fd = self._listener.fileno()
        readable, _, _ = select.select((listener_fd, stop_fd), (), (), seconds)
        if stop_fd in readable:
            return WakeReason.STOP
        return WakeReason.CONNECTION if readable else WakeReason.TIMEOUT

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._listener.close()
