"""How a program reaches the server, without what is secret or a path of this host."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """A target of gRPC, and which options of security it needs.

    `authorities` and `certificate`: the server's authorities are in a file of one's own, and the
    server asks for a client's certificate.
    """

    target: str
    encrypted: bool = False
    authorities: bool = False
    certificate: bool = False
    token: bool = False
