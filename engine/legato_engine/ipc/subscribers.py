"""The engine's end of those who listen to its heartbeats; it belongs to the heartbeat's thread."""

from __future__ import annotations

import enum
import select
import socket

from legato_engine.ipc.framing import FrameWriter
from legato_engine.ipc.links import inherited, pending_connections
from legato_engine.ipc.messages import Heartbeat, encode


class Woken(enum.Enum):
    """What ended a wait."""

    STOP = enum.auto()
    NEWCOMER = enum.auto()
    TIME = enum.auto()


class Subscribers:
    """Everybody who listens to this engine's heartbeats."""

    def __init__(self, door: int) -> None:
        self._door = inherited(door)
        self._listeners: dict[socket.socket, FrameWriter] = {}

    def send(self, beat: Heartbeat) -> None:
        """Tell all, newcomers included. Who has not read the beats before misses this one."""
        for connection in pending_connections(self._door):
            self._listeners[connection] = FrameWriter()
        frame = encode(beat)
        for connection, unsent in list(self._listeners.items()):
            try:
                if unsent.write_to(connection):
                    unsent.add(frame)
                    unsent.write_to(connection)
            except OSError:
                del self._listeners[connection]
                connection.close()

    def wait(self, stop_fd: int, seconds: float) -> Woken:
        """Until `stop_fd` is readable, somebody knocks, or the time is up."""
        door = self._door.fileno()
        readable, _, _ = select.select((door, stop_fd), (), (), seconds)
        if stop_fd in readable:
            return Woken.STOP
        return Woken.NEWCOMER if readable else Woken.TIME

    def close(self) -> None:
        """Hang up on all."""
        for connection in self._listeners:
            connection.close()
        self._door.close()
