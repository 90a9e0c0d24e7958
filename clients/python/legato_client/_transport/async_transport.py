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


CALLS_PER_CHANNEL = 100
"""At once. A server begins only so many calls of a connection (Legato 256, proxies often 100); gRPC
lets further ones wait without a word."""


class PooledChannel:
    """A channel with a connection of its own, and the calls that it carries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_calls = 0
        self.starts: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, Any]] = {}  # by path

    def __enter__(self) -> grpc.aio.Channel:
        self.num_calls += 1
        return self.channel

    def __exit__(self, *_: object) -> None:
        self.num_calls -= 1

    def carry(self, call: grpc.aio.Call) -> None:
        """Count a call until it is done."""
        self.num_calls += 1
        call.add_done_callback(self.__exit__)


class AsyncTransport:
    """Over `grpc.aio` channels, the first of which opens at the first call, in its loop."""

    def __init__(self, settings: Settings) -> None:
        # Else gRPC makes it for every call.
        self._metadata = CallMetadata(settings, lambda own: grpc.aio.Metadata(*own))
        self._settings = settings
        self._channels: list[PooledChannel] = []

    def metadata(self, affinity: str = "") -> grpc.aio.Metadata:
        return self._metadata.current(affinity)

    def channel(self) -> PooledChannel:
        """Return the first channel with room for a call, which enters it while it runs."""
        for each in self._channels:
            if each.num_calls < CALLS_PER_CHANNEL:
                return each
        target, options = self._settings.target, self._settings.channel_options
        options += (("grpc.use_local_subchannel_pool", 1),)  # or all share one connection
        credentials = self._settings.security.credentials
        if credentials is None:
            made = PooledChannel(grpc.aio.insecure_channel(target, options=options))
        else:
            made = PooledChannel(grpc.aio.secure_channel(target, credentials, options=options))
        self._channels.append(made)
        return made

    async def unary(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> ResponseT:
        pooled = self.channel()
        start = pooled.starts.get(method.path)
        if start is None:
            start = pooled.starts[method.path] = pooled.channel.unary_unary(method.path)
        try:
            with pooled:
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
        with self.channel() as channel:
            start: grpc.aio.StreamUnaryMultiCallable[Any, bytes] = channel.stream_unary(method.path)
            call = start(requests, timeout=timeout, metadata=self.metadata(affinity))
            status = ServerStatus(call)
            try:
                return message_of(method.response, await call)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(await status.instead_of(error)) from error

    async def stream(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> AsyncGenerator[ResponseT, None]:
        with self.channel() as channel:
            start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
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
        channels, self._channels = self._channels, []
        for each in channels:
            await each.channel.close()
