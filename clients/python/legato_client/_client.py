"""The blocking client: the same calls as `AsyncClient`, over a blocking channel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from legato.v1 import inference_pb2, media_pb2, server_pb2

from legato_client import _channel, _convert, _events, _methods, _requests, _server, _tasks, _types
from legato_client._errors import from_rpc_error
from legato_client._images import ImageInput, to_image

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")

_DEFAULT_SAMPLING = _tasks.Sampling()
_DEFAULT_OPTIONS = _tasks.Options()


class Client:
    """Talks to one Legato server from a blocking program; safe to share between threads.

    `target` is any gRPC name ("host:port", "dns:///name:port", "unix:/path"). `timeout` and
    `stream_timeout` (seconds) hold for calls that bring none. Without `credentials` the connection
    is not encrypted.

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
        target = target or _channel.default_target()
        self._timeout = timeout
        self._stream_timeout = stream_timeout
        self._metadata = _channel.call_metadata(token, metadata)
        self._max_message_bytes = max_message_bytes
        channel_options = _channel.channel_options(max_message_bytes, target)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=channel_options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=channel_options)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End running calls and the connection."""
        self._channel.close()

    def query(
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
        request = _requests.query(_optional(image), task, options)
        return self._unary(_methods.QUERY, request, timeout)

    def caption(
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
        request = _requests.caption(to_image(image), task, options)
        return self._unary(_methods.CAPTION, request, timeout)

    def detect(
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
        request = _requests.detect(to_image(image), task, options)
        return self._unary(_methods.DETECT, request, timeout)

    def point(
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
        request = _requests.point(to_image(image), task, options)
        return self._unary(_methods.POINT, request, timeout)

    def segment(
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
        request = _requests.segment(to_image(image), task, options)
        return self._unary(_methods.SEGMENT, request, timeout)

    def run_tasks(
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
        request = _requests.run_tasks(_optional(image), tasks, options)
        return self._unary(_methods.RUN_TASKS, request, timeout)

    def generate(
        self,
        image: ImageInput | None,
        task: _tasks.Task,
        *,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> Generator[_events.Event, None, None]:
        """Events of one task as they decode, `Finished` last.

        Leaving the loop early cancels the work on the server once this iterator is closed: use
        `contextlib.closing` where that moment matters.
        """
        request = _requests.generate(_optional(image), task, options)
        data = _channel.serialize(request, self._max_message_bytes)
        method, reader = _methods.GENERATE, _methods.EventReader()
        start: grpc.UnaryStreamMultiCallable[bytes, inference_pb2.GenerateResponse] = (
            self._channel.unary_stream(
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
            for message in call:
                event = reader.read(message)
                if event is not None:
                    yield event
            yield reader.end()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def server_info(self, *, timeout: float | None = None) -> _server.ServerInfo:
        """Version, limits and capabilities of the server."""
        request = server_pb2.GetServerInfoRequest()
        return self._unary(_methods.GET_SERVER_INFO, request, timeout)

    def models(self, *, timeout: float | None = None) -> tuple[_server.ModelInfo, ...]:
        """Every served model, all pages."""
        found: list[_server.ModelInfo] = []
        page_token = ""
        while True:
            request = server_pb2.ListModelsRequest(page_token=page_token)
            page, page_token = self._unary(_methods.LIST_MODELS, request, timeout)
            found += page
            if not page_token:
                return tuple(found)

    def _unary(
        self,
        method: _methods.Method[ResponseT, ValueT],
        request: Message,
        timeout: float | None,
    ) -> ValueT:
        data = _channel.serialize(request, self._max_message_bytes)
        call: grpc.UnaryUnaryMultiCallable[bytes, ResponseT] = self._channel.unary_unary(
            method.path,
            response_deserializer=method.response.FromString,
        )
        deadline = _channel.Deadline(self._timeout if timeout is None else timeout)
        for attempt in itertools.count(1):
            try:
                response = call(data, timeout=deadline.left(), metadata=self._metadata)
                return method.parse(response)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay = _channel.busy_delay(failure, attempt, deadline.left())
                if delay is None:
                    raise failure from error
            time.sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _optional(image: ImageInput | None) -> media_pb2.Image | None:
    return None if image is None else to_image(image)
