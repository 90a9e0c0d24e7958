"""Listening address of a web process, and what protects it."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

from legato_client._grpc.settings import is_loopback

DEFAULT = "127.0.0.1:8080"
BACKLOG = 128
"""Connections that the kernel holds until they are accepted."""

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclasses.dataclass(frozen=True, slots=True)
class Listen:
    """An address, HOST:PORT with an IPv6 host in brackets, and its protection.

    `require_token`: a request without a token of its own is refused; None for a page, which sends
    none.
    """

    address: str = DEFAULT
    allow_remote: bool = False
    require_token: bool | None = False
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """0: any that is free."""
        return int(self.address.rpartition(":")[2])

    @property
    def is_local(self) -> bool:
        """Return whether no other machine can reach the address."""
        return is_loopback(self.host)

    def is_named(self, host: str) -> bool:
        """Return whether a Host header, with or without a port, names this host."""
        name = (
            host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()
        )
        return name in (*_LOCAL_NAMES, self.address.rpartition(":")[0].lower())

    def check(self) -> None:
        """Check the address and what protects it. Raises ValueError, or OSError for a file."""
        host, _, port = self.address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"--listen takes HOST:PORT, not {self.address!r}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key need each other")
        for file in filter(None, (self.tls_cert, self.tls_key)):
            Path(file).read_bytes()
        protected = self.tls_cert and self.require_token
        if not (self.is_local or protected or self.allow_remote):
            tokens = "protect it with --tls-cert, --tls-key and --require-token, or "
            advice = "" if self.require_token is None else tokens
            raise ValueError(
                f"others can reach {self.address}: {advice}allow it with --allow-remote"
            )

    def bind(self) -> socket.socket:
        family, kind, protocol, _, name = socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(name)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
        return bound

    def url(self, bound: socket.socket) -> str:
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://{self.address.rpartition(':')[0]}:{bound.getsockname()[1]}"
