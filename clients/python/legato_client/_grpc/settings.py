"""Client settings: security, bearer tokens, call metadata."""

from __future__ import annotations

import codecs
import dataclasses
import os
import re
import ssl
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from legato_client._errors import InvalidArgument, Unauthenticated, UnencryptedToken
from legato_client._grpc import channel
from legato_client._grpc.channel import KEY
from legato_client._types.results import Mark, Result, TrackNow
from legato_client._types.server import FrameResult

if TYPE_CHECKING:
    from legato_client.depth import Lifted

BearerToken = str | os.PathLike[str] | Callable[[], str]
"""A token, the path of a file with one, or a function that returns the current one ("": none)."""

VARIABLE = "LEGATO_TOKEN"
"""Environment variable with the default token."""

_FORM = re.compile(r"[\x21-\x7e]{1,8192}")
_CREDENTIAL = re.compile(r"legato_([A-Za-z0-9.-]+)_[A-Za-z0-9_-]+")
_LOCAL_SCHEMES = ("unix", "unix-abstract")
_NAME_SCHEMES = ("dns", "ipv4", "ipv6")


class TokenSource:
    """The current token of a client. Its text is in no repr and in no error.

    A file is read again when it changes, so a token is replaced by renaming another file over it. A
    function is called for every call, in the event loop of an `AsyncClient`.
    """

    def __init__(self, token: BearerToken) -> None:
        self._given = _checked(token) if isinstance(token, str) else token
        self._content = ""
        self._stamp: tuple[int, int, int] | None = None  # of the file with that content
        if not callable(token):
            self.read()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"

    def read(self) -> str:
        """Return the current token; "" where a function says that there is none.

        Raises:
            Unauthenticated: the file cannot be read.
            InvalidArgument: the text cannot be a token.
        """
        if isinstance(self._given, str):
            return self._given
        if callable(self._given):
            current = self._given()
            return _checked(current) if current else ""
        return self._file_content(os.fspath(self._given))

    @property
    def credential(self) -> str:
        """The public id in a Legato server's token, else empty."""
        match = _CREDENTIAL.fullmatch(self.read())
        return "" if match is None else match.group(1)

    def _file_content(self, path: str) -> str:
        try:
            status = os.stat(path)  # a Path's own costs several times as much
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
                self._content = _checked(data.decode("ascii").strip())
                self._stamp = stamp
            return self._content
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "it holds more than ASCII text"
            raise Unauthenticated(f"cannot read the token file {path}: {problem}") from None


def source_of(token: BearerToken | None) -> TokenSource | None:
    """Return the token source; None for an empty text or without a token in the environment."""
    given = os.environ.get(VARIABLE, "") if token is None else token
    return TokenSource(given) if given else None


def check_target(target: str) -> None:
    """Check that a connection to `target` without TLS stays on this host.

    Raises:
        UnencryptedToken: it may leave the host.
    """
    if not is_local(target):
        raise UnencryptedToken(
            f"a token is not sent to {target} without TLS, where others could read it; use TLS "
            f"(tls, ca), or leave out the token, also that of {VARIABLE}"
        )


def is_local(target: str) -> bool:
    """Return whether all addresses of a gRPC name are certain to be on this host."""
    scheme, separator, rest = target.partition(":")
    if separator and scheme in _LOCAL_SCHEMES:
        return True
    if scheme in _NAME_SCHEMES:
        # "dns://server/name" asks a server of its own, which may say anything of localhost.
        names = rest.removeprefix("///")
        return "/" not in names and _are_loopback(names)
    return _are_loopback(target)


def _are_loopback(names: str) -> bool:
    addresses = map(channel.host_and_port, names.split(","))
    return all(is_loopback(host.strip("[]")) and port.isdecimal() for host, port in addresses)


def is_loopback(host: str) -> bool:
    """Return whether a host without a port is certain to be this one."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _checked(token: str) -> str:
    # gRPC's own error would show the token.
    if _FORM.fullmatch(token) is None:
        raise InvalidArgument("a token is 1 to 8192 printable ASCII characters without spaces")
    return token


# ---------------------------------------------------------------- security

Pem = str | os.PathLike[str] | bytes
"""The path of a PEM file, or its bytes."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Security:
    """Connection security. It can be pickled unless it has `given` credentials.

    `ca` empty: the authorities that gRPC knows. `given`: TLS credentials made by the caller.
    `is_local`: the server is on this host.
    """

    encrypted: bool = False
    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""
    token: TokenSource | None = None
    given: grpc.ChannelCredentials | None = None
    is_local: bool = False

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the channel credentials, or None without TLS."""
        if self.given is not None or not self.encrypted:
            return self.given
        return grpc.ssl_channel_credentials(self.ca or None, self.key or None, self.cert or None)

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Keep from the environment's proxy what stays on this host, and a token without TLS."""
        exposed = self.token is not None and not self.encrypted
        return (("grpc.enable_http_proxy", 0),) if exposed or self.is_local else ()

    def open_channel(self, library: Any, target: str, options: channel.ChannelOptions) -> Any:
        """Open a channel of `library`: `grpc` or `grpc.aio`."""
        credentials = self.credentials
        if credentials is None:
            return library.insecure_channel(target, options=options)
        return library.secure_channel(target, credentials, options=options)

    def metadata(self) -> channel.Metadata:
        """Return the current token as metadata, if there is one. Raises as `TokenSource.read`."""
        token = "" if self.token is None else self.token.read()
        return (("authorization", f"Bearer {token}"),) if token else ()

    def describe(self) -> str:
        """Describe the security for people, without secrets."""
        parts = ["TLS" if self.encrypted else "not encrypted"]
        if self.cert:
            parts.append("with a client certificate")
        if self.token is not None:
            credential = self.token.credential
            parts.append(f"as credential {credential}" if credential else "with a token")
        return ", ".join(parts)

    def summary(self) -> dict[str, bool | str]:
        """Return the content of `describe` for machines."""
        return {
            "encrypted": self.encrypted,
            "client_certificate": bool(self.cert),
            "token": self.token is not None,
            "credential": self.token.credential if self.token is not None else "",
        }


OPEN = Security()
"""Security without TLS and token."""


def read_security(
    target: str,
    *,
    tls: bool | None = None,
    ca: Pem | None = None,
    cert: Pem | None = None,
    key: Pem | None = None,
    token: BearerToken | None = None,
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
    source = source_of(token)
    encrypted = bool(tls) or own or credentials is not None
    if source is not None and not encrypted:
        check_target(target)
    security = Security(
        encrypted,
        _read(ca, "ca"),
        _read(cert, "cert"),
        _read(key, "key"),
        source,
        credentials,
        is_local(target),
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


MetadataT = TypeVar("MetadataT")


@dataclasses.dataclass(frozen=True, slots=True)
class ClientSettings:
    """Times are in seconds."""

    target: str
    timeout: float
    stream_timeout: float
    security: Security
    metadata: channel.Metadata  # without a token
    max_message_bytes: int

    @property
    def channel_options(self) -> channel.ChannelOptions:
        options = channel.channel_options(self.max_message_bytes, self.target)
        return options + self.security.channel_options


class CallMetadata(Generic[MetadataT]):
    """The metadata of every call, made again only when the token has changed.

    Plain metadata, because gRPC's call credentials start a thread for every call.
    """

    def __init__(
        self, settings: ClientSettings, make: Callable[[channel.Metadata], MetadataT]
    ) -> None:
        self._settings = settings
        self._bearer: channel.Metadata = ()
        self._make = make
        self._made = make(settings.metadata)

    def current(self, affinity: str = "") -> MetadataT:
        """Return the current metadata. Raises as `TokenSource.read`."""
        bearer = self._settings.security.metadata()
        if bearer != self._bearer:
            self._made = self._make((*self._settings.metadata, *bearer))
            self._bearer = bearer
        if affinity:
            return self._make((*self._settings.metadata, *bearer, (KEY, affinity)))
        return self._made


class ConfiguredClient:
    """Base of both clients, with their shared arguments."""

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout: float = channel.DEFAULT_TIMEOUT,
        stream_timeout: float = channel.DEFAULT_STREAM_TIMEOUT,
        tls: bool | None = None,
        ca: Pem | None = None,
        cert: Pem | None = None,
        key: Pem | None = None,
        token: BearerToken | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        metadata: channel.Metadata = (),
        max_message_bytes: int = channel.MAX_MESSAGE_BYTES,
    ) -> None:
        target = target or os.environ.get("LEGATO_SERVER") or channel.DEFAULT_TARGET
        target = channel.full_target(target)
        self._connect(
            ClientSettings(
                target=target,
                timeout=timeout,
                stream_timeout=stream_timeout,
                security=read_security(
                    target, tls=tls, ca=ca, cert=cert, key=key, token=token, credentials=credentials
                ),
                metadata=channel.call_metadata(priority, tenant, metadata),
                max_message_bytes=max_message_bytes,
            )
        )

    def lift(
        self,
        result: Result | FrameResult | Iterable[Mark | TrackNow],
        depth: Any,
        intrinsics: Any,
    ) -> tuple[Lifted, ...]:
        """Estimate where the marks of a result are in 3D, without the server.

        Needs numpy; the arguments are those of `legato_client.depth.lift`.
        """
        from legato_client.depth import lift  # no call but this one needs numpy

        return lift(result, depth, intrinsics)

    def _connect(self, settings: ClientSettings) -> None:
        raise NotImplementedError
