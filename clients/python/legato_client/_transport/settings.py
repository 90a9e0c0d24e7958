"""What a client is told when it is made, and what both faces make of it."""

from __future__ import annotations

import dataclasses

import grpc

from legato_client._transport import channel


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Where the server is and how to talk to it; times are in seconds."""

    target: str
    timeout: float
    stream_timeout: float
    credentials: grpc.ChannelCredentials | None
    metadata: channel.Metadata
    max_message_bytes: int

    @property
    def channel_options(self) -> channel.ChannelOptions:
        """GRPC channel arguments."""
        return channel.channel_options(self.max_message_bytes, self.target)


class ConfiguredClient:
    """Takes the arguments that both faces share."""

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout: float = channel.DEFAULT_TIMEOUT,
        stream_timeout: float = channel.DEFAULT_STREAM_TIMEOUT,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        metadata: channel.Metadata = (),
        max_message_bytes: int = channel.MAX_MESSAGE_BYTES,
    ) -> None:
        self._connect(
            Settings(
                target=target or channel.default_target(),
                timeout=timeout,
                stream_timeout=stream_timeout,
                credentials=credentials,
                metadata=channel.call_metadata(token, priority, tenant, metadata),
                max_message_bytes=max_message_bytes,
            )
        )

    def _connect(self, settings: Settings) -> None:
        """Make the transport of this face."""
        raise NotImplementedError
