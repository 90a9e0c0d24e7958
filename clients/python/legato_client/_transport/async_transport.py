# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""The asyncio transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from legato_client._errors import from_rpc_error
from legato_client._transport.async_status import ServerStatus
from legato_client._transport.methods import Method, message_of
from legato_client._transport.settings import CallMetadata, Settings

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


class AsyncTransport:
    """Over a `grpc.aio` channel, which opens at the first call, in its loop."""

    def __init__(self, settings: Settings) -> None:
        # Else gRPC makes it for every call.
        self._metadata = CallMetadata(settings, lambda own: grpc.aio.Metadata(*own))
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._starts: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, Any]] = {}  # by path

    def metadata(self, affinity: str = "") -> grpc.aio.Metadata:
        return self._metadata.current(affinity)

    async def unary(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> ResponseT:
        start = self._starts.get(method.path)
        if start is None:
            start = self._starts[method.path] = self.channel.unary_unary(method.path)
        try:
            metadata = self.metadata(affinity)
            data = await start(request, timeout=timeout, metadata=metadata)
            return message_of(method.response, cast("bytes", data))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def upload(
        self,
        method: Method[ResponseT, ValueT],
        requests: Iterator[bytes],
        timeout: float,
        affinity: str,
    ) -> ResponseT:
        start: grpc.aio.StreamUnaryMultiCallable[Any, bytes] = self.channel.stream_unary(
            method.path
        )
        call = start(requests, timeout=timeout, metadata=self.metadata(affinity))
        status = ServerStatus(call)
        try:
            return message_of(method.response, await call)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(await status.instead_of(error)) from error

    async def stream(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> AsyncGenerator[ResponseT, None]:
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(
            method.path
        )
        call = start(request, timeout=timeout, metadata=self.metadata(affinity))
        try:
            async for message in call:
                yield message_of(method.response, message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def run(self, work: Callable[[], ValueT]) -> ValueT:
        return await asyncio.to_thread(work)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """A later call opens another connection."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            self._starts.clear()
            await channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            target, options = self._settings.target, self._settings.channel_options
            credentials = self._settings.security.credentials
            if credentials is None:
                self._channel = grpc.aio.insecure_channel(target, options=options)
            else:
                self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        return self._channel
