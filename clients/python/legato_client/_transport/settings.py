"""The settings of a client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from legato_client._transport import channel, security
from legato_client._transport.affinity import KEY
from legato_client._transport.security import Pem, Security
from legato_client._transport.token import BearerToken, TokenSource

MetadataT = TypeVar("MetadataT")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
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

    __slots__ = ("_fixed", "_made", "_make", "_own", "_token", "_tokens")

    def __init__(self, settings: Settings, make: Callable[[channel.Metadata], MetadataT]) -> None:
        self._fixed = self._own = settings.metadata
        self._tokens: TokenSource | None = settings.security.token
        self._token = ""
        self._make = make
        self._made = make(self._fixed)

    def current(self, affinity: str = "") -> MetadataT:
        """Raises as `TokenSource.read`."""
        if self._tokens is not None and (token := self._tokens.read()) != self._token:
            bearer = (("authorization", f"Bearer {token}"),) if token else ()
            self._own = (*self._fixed, *bearer)
            self._made = self._make(self._own)
            self._token = token
        if affinity:
            return self._make((*self._own, (KEY, affinity)))
        return self._made


class ConfiguredClient:
    """Takes the arguments that both clients share."""

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
        target = channel.full_target(target or channel.default_target())
        self._connect(
            Settings(
                target=target,
                timeout=timeout,
                stream_timeout=stream_timeout,
                security=security.of(
                    target, tls=tls, ca=ca, cert=cert, key=key, token=token, credentials=credentials
                ),
                metadata=channel.call_metadata(priority, tenant, metadata),
                max_message_bytes=max_message_bytes,
            )
        )

    def _connect(self, settings: Settings) -> None:
        raise NotImplementedError
