# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""The asyncio client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from legato.v1 import inference_pb2, media_pb2, server_pb2

from legato_client import _channel, _convert, _events, _methods, _requests, _server, _tasks, _types
from legato_client._errors import from_rpc_error
from legato_client._images import ImageInput, to_image_async

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")

_DEFAULT_SAMPLING = _tasks.Sampling()
_DEFAULT_OPTIONS = _tasks.Options()


class AsyncClient:
    """Talks to one Legato server from an asyncio program.

    `target` is any gRPC name ("host:port", "dns:///name:port", "unix:/path"). `timeout` and
    `stream_timeout` (seconds) hold for calls that bring none. Without `credentials` the connection
    is not encrypted. The channel opens at the first call, in the loop that makes it.

    Calls raise `LegatoError`; an unreadable picture raises what `to_image` names.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        timeout: float = _channel.DEFAULT_TIMEOUT,
        stream_timeout: float = _channel.DEFAULT_STREAM_TIMEOUT,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: _channel.Metadata = (),
        max_message_bytes: int = _channel.MAX_MESSAGE_BYTES,
    ) -> None:
        self._target = target or _channel.default_target()
        self._timeout = timeout
        self._stream_timeout = stream_timeout
        self._credentials = credentials
        self._metadata = _channel.call_metadata(token, metadata)
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End running calls and the connection."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def query(
        self,
        image: ImageInput | None,
        question: str,
        *,
        reasoning: bool = False,
        spatial_refs: Sequence[_tasks.SpatialRef] = (),
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> _types.QueryResult:
        """Answer a question, about the picture when there is one."""
        task = _tasks.QueryTask(question, reasoning, tuple(spatial_refs), sampling)
        request = _requests.query(await _optional(image), task, options)
        return await self._unary(_methods.QUERY, request, timeout)

    async def caption(
        self,
        image: ImageInput,
        length: _tasks.CaptionLength = "normal",
        *,
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> _types.CaptionResult:
        """Describe the picture."""
        task = _tasks.CaptionTask(length, sampling)
        request = _requests.caption(await to_image_async(image), task, options)
        return await self._unary(_methods.CAPTION, request, timeout)

    async def detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> _types.DetectResult:
        """Box every instance of `object`."""
        task = _tasks.DetectTask(object, max_objects, sampling)
        request = _requests.detect(await to_image_async(image), task, options)
        return await self._unary(_methods.DETECT, request, timeout)

    async def point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Sequence[_tasks.SpatialRef] = (),
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> _types.PointResult:
        """Point at every instance of `object`."""
        task = _tasks.PointTask(object, max_objects, tuple(spatial_refs), sampling)
        request = _requests.point(await to_image_async(image), task, options)
        return await self._unary(_methods.POINT, request, timeout)

    async def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Sequence[_tasks.SpatialRef] = (),
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> _types.SegmentResult:
        """Outline `object`."""
        task = _tasks.SegmentTask(object, tuple(spatial_refs), sampling)
        request = _requests.segment(await to_image_async(image), task, options)
        return await self._unary(_methods.SEGMENT, request, timeout)

    async def run_tasks(
        self,
        image: ImageInput | None,
        tasks: Sequence[_tasks.Task],
        *,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> tuple[_convert.TaskOutcome, ...]:
        """Several tasks on one picture, encoded once: one outcome per task, in the same order.

        A task that failed alone has its `LegatoError` as its outcome; nothing is raised for it.
        """
        request = _requests.run_tasks(await _optional(image), tasks, options)
        return await self._unary(_methods.RUN_TASKS, request, timeout)

    async def generate(
        self,
        image: ImageInput | None,
        task: _tasks.Task,
        *,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> AsyncGenerator[_events.Event, None]:
        """Events of one task as they decode, `Finished` last.

        Leaving the loop early cancels the work on the server once this iterator is closed: use
        `contextlib.aclosing` where that moment matters.
        """
        request = _requests.generate(await _optional(image), task, options)
        data = _channel.serialize(request, self._max_message_bytes)
        method, reader = _methods.GENERATE, _methods.EventReader()
        start: grpc.aio.UnaryStreamMultiCallable[bytes, inference_pb2.GenerateResponse] = (
            self._open().unary_stream(
                method.path,
                response_deserializer=method.response.FromString,
            )
        )
        call = start(
            data,
            timeout=self._stream_timeout if timeout is None else timeout,
            metadata=self._metadata,
        )
        try:
            async for message in call:
                event = reader.read(message)
                if event is not None:
                    yield event
            yield reader.end()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def server_info(self, *, timeout: float | None = None) -> _server.ServerInfo:
        """Version, limits and capabilities of the server."""
        request = server_pb2.GetServerInfoRequest()
        return await self._unary(_methods.GET_SERVER_INFO, request, timeout)

    async def models(self, *, timeout: float | None = None) -> tuple[_server.ModelInfo, ...]:
        """Every served model, all pages."""
        found: list[_server.ModelInfo] = []
        page_token = ""
        while True:
            request = server_pb2.ListModelsRequest(page_token=page_token)
            page, page_token = await self._unary(_methods.LIST_MODELS, request, timeout)
            found += page
            if not page_token:
                return tuple(found)

    async def _unary(
        self,
        method: _methods.Method[ResponseT, ValueT],
        request: Message,
        timeout: float | None,
    ) -> ValueT:
        data = _channel.serialize(request, self._max_message_bytes)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, ResponseT] = self._open().unary_unary(
            method.path,
            response_deserializer=method.response.FromString,
        )
        deadline = _channel.Deadline(self._timeout if timeout is None else timeout)
        for attempt in itertools.count(1):
            try:
                response = await call(data, timeout=deadline.left(), metadata=self._metadata)
                return method.parse(response)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay = _channel.busy_delay(failure, attempt, deadline.left())
                if delay is None:
                    raise failure from error
            await asyncio.sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            options = _channel.channel_options(self._max_message_bytes, self._target)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._target, options=options)
            else:
                self._channel = grpc.aio.secure_channel(
                    self._target, self._credentials, options=options
                )
        return self._channel


async def _optional(image: ImageInput | None) -> media_pb2.Image | None:
    return None if image is None else await to_image_async(image)
