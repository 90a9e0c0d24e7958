"""A port that only the processes of this server share."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_NOT_HERE = (
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
)  # an address family that this host does not have


@contextmanager
def reserved(listen: str) -> Iterator[str]:
    """Hold `listen` (host:port) for the length of the block; yields it with the port's number.

    SO_REUSEPORT alone would let this server join another one that set it, too. So the port is first
    bound without it, which fails when it is in use, and then opened to this server's processes.

    Raises:
        OSError: the address is in use or does not exist.
    """
    host, _, port_text = listen.rpartition(":")
    port = int(port_text)
    with ExitStack() as held:
        missing: OSError | None = None
        for family, address in _addresses(host.strip("[]")):
            holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                port = _hold(holder, address, port)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if not port and missing is not None:
            raise missing
        yield f"{host}:{port}"


def _hold(holder: socket.socket, address: str, port: int) -> int:
    """Bind the socket without listening; return its port."""
    # Connections in TIME_WAIT do not prevent the bind.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, port))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return int(holder.getsockname()[1])


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
