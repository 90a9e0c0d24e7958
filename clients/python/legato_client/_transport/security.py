"""The encryption of a connection, and as whom a client calls."""

from __future__ import annotations

import dataclasses
import os
import ssl
from pathlib import Path

import grpc

from legato_client._transport import token as tokens

Pem = str | os.PathLike[str] | bytes
"""The path of a PEM file, or its bytes."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Security:
    """How a client connects. It can be sent to another process, unless it has `given` credentials.

    `ca` empty: the authorities that gRPC knows. `given`: TLS credentials made by the caller.
    `is_local`: the server is on this host.
    """

    encrypted: bool = False
    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""
    token: tokens.TokenSource | None = None
    given: grpc.ChannelCredentials | None = None
    is_local: bool = False

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS."""
        if self.given is not None or not self.encrypted:
            return self.given
        return grpc.ssl_channel_credentials(self.ca or None, self.key or None, self.cert or None)

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Keep from the environment's proxy what stays on this host, and a token without TLS."""
        exposed = self.token is not None and not self.encrypted
        return (("grpc.enable_http_proxy", 0),) if exposed or self.is_local else ()

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """The current token, if any, as metadata. Raises as `TokenSource.read`."""
        token = "" if self.token is None else self.token.read()
        return (("authorization", f"Bearer {token}"),) if token else None

    def describe(self) -> str:
        """For people: without a secret."""
        parts = ["TLS" if self.encrypted else "not encrypted"]
        if self.cert:
            parts.append("with a client certificate")
        if self.token is not None:
            credential = self.token.credential
            parts.append(f"as credential {credential}" if credential else "with a token")
        return ", ".join(parts)

    def summary(self) -> dict[str, bool | str]:
        """What `describe` says, for machines."""
        return {
            "encrypted": self.encrypted,
            "client_certificate": bool(self.cert),
            "token": self.token is not None,
            "credential": self.token.credential if self.token is not None else "",
        }


OPEN = Security()
"""Without TLS and token."""


def of(
    target: str,
    *,
    tls: bool | None = None,
    ca: Pem | None = None,
    cert: Pem | None = None,
    key: Pem | None = None,
    token: tokens.BearerToken | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> Security:
    """Read and check the settings of a connection; see `AsyncClient`.

    Raises:
        OSError: a file cannot be read.
        ValueError: the settings contradict each other, or a PEM file is malformed.
        UnencryptedToken: the token would travel unencrypted.
    """
    own = ca is not None or cert is not None or key is not None
    if credentials is not None and (own or tls is not None):
        raise ValueError("credentials exclude tls, ca, cert and key")
    if own and tls is False:
        raise ValueError("ca, cert and key need TLS")
    if (cert is None) != (key is None):
        raise ValueError("a client certificate needs both cert and key")
    source = tokens.source_of(token)
    encrypted = bool(tls) or own or credentials is not None
    if source is not None and not encrypted:
        tokens.check_target(target)
    security = Security(
        encrypted,
        _read(ca, "ca"),
        _read(cert, "cert"),
        _read(key, "key"),
        source,
        credentials,
        tokens.is_local(target),
    )
    if security.ca:
        _check_authority(security.ca)
    return security


def _read(pem: Pem | None, name: str) -> bytes:
    if pem is None:
        return b""
    data = pem if isinstance(pem, bytes) else Path(pem).read_bytes()
    # With anything else gRPC makes a channel whose every call fails without a reason.
    if b"-----BEGIN " not in data:
        raise ValueError(f"{name} is not in PEM form")
    return data


def _check_authority(pem: bytes) -> None:
    try:
        ssl.create_default_context(cadata=pem.decode("ascii", "replace"))
    except ssl.SSLError as error:
        raise ValueError(f"ca holds no valid certificate: {error.reason or error}") from None
