"""The side of the fork server that asks for processes."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

import msgspec

MAX_MESSAGE = 200_000  # bytes; a sequenced packet's is limited
NAME = "fork server"
"""Of the process that forks others, as the kernel shows it."""

_PADDING = " " * 16_384
_PR_SET_CHILD_SUBREAPER = 36


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A process to fork; the files with the numbers `fds` come with the message."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]
    parent: int
    new_session: bool


class ForkServer:
    """Starts processes that become children of this one."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, environment: Mapping[str, str], imported: str) -> ForkServer:
        """Start a fork server, which imports what is named so; it ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = (str(theirs.fileno()), imported, _PADDING)
            subprocess.Popen(
                (sys.executable, "-m", "tests.fork_server", *arguments),
                env={**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        return cls(ours)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        fds: Mapping[int, int],
        *,
        folder: str = ".",
        new_session: bool = False,
    ) -> int:
        """Run a module in a process with these files and no others; return its id.

        `fds` maps the numbers of the files there to those here.
        """
        start = Start(
            module=module,
            arguments=list(arguments),
            environment=dict(environment),
            folder=os.path.abspath(folder),
            fds=list(fds),
            parent=os.getpid(),
            new_session=new_session,
        )
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [msgspec.json.encode(start)], list(fds.values()))
                return int(self._channel.recv(32))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)


def prctl(operation: int, value: int | bytes) -> None:
    """As the kernel's of this name."""
    failed = ctypes.CDLL(None).prctl(operation, value, 0, 0, 0)
    assert not failed, f"this kernel does not know the operation {operation}"
