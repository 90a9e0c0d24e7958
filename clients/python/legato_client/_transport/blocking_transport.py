# ruff: noqa: ASYNC109, ASYNC251 - coroutines in shape only: they block by contract, see `run`
"""The blocking transport."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from legato_client._errors import from_rpc_error
from legato_client._transport.channel import Metadata
from legato_client._transport.methods import Method, message_of
from legato_client._transport.settings import CallMetadata, Settings

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


def run(call: Coroutine[Any, Any, ValueT]) -> ValueT:
    """The coroutine blocks and never suspends."""
    try:
        call.send(None)
    except StopIteration as done:
        value: ValueT = done.value
        return value
    call.close()
    raise AssertionError("a call over the blocking transport suspended")


class BlockingTransport:
    """Over a `grpc` channel; every method does its work before it returns."""

    def __init__(self, settings: Settings) -> None:
        self._metadata = CallMetadata(settings, lambda own: own)
        self._starts: dict[str, grpc.UnaryUnaryMultiCallable[bytes, Any]] = {}  # by path
        target, options = settings.target, settings.channel_options
        credentials = settings.security.credentials
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options=options)
        else:
            self.channel = grpc.secure_channel(target, credentials, options=options)

    def metadata(self, affinity: str = "") -> Metadata:
        return self._metadata.current(affinity)

    async def unary(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> ResponseT:
        start = self._starts.get(method.path)
        if start is None:
            start = self._starts[method.path] = self.channel.unary_unary(method.path)
        try:
            metadata = self.metadata(affinity)
            data = start(request, timeout=timeout, metadata=metadata)
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
        start: grpc.StreamUnaryMultiCallable[bytes, bytes] = self.channel.stream_unary(method.path)
        try:
            data = start(requests, timeout=timeout, metadata=self.metadata(affinity))
            return message_of(method.response, data)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def stream(
        self, method: Method[ResponseT, ValueT], request: bytes, timeout: float, affinity: str
    ) -> AsyncGenerator[ResponseT, None]:
        start: grpc.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(method.path)
        call = start(request, timeout=timeout, metadata=self.metadata(affinity))
        try:
            for message in call:
                yield message_of(method.response, message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def run(self, work: Callable[[], ValueT]) -> ValueT:
        return work()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self.channel.close()
