# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""Every call of both clients, written once over a `Transport`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message
from legato.v1 import image_pb2, media_pb2, server_pb2

from legato_client import _channel, _convert, _events, _methods, _requests, _server, _tasks, _types
from legato_client._errors import Busy, PermissionDenied, Unimplemented
from legato_client._images import CachedImage, HeldImage, ImageInput, is_ready, to_image
from legato_client._settings import Settings
from legato_client._transport import Transport
from legato_client._upload import Upload

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")

_DEFAULT_SAMPLING = _tasks.Sampling()
_DEFAULT_OPTIONS = _tasks.Options()


class Calls:
    """What a client can ask; `AsyncClient` and `Client` show these methods as their own."""

    def __init__(self, settings: Settings, transport: Transport) -> None:
        self._settings = settings
        self._transport = transport
        self._server: _server.ServerInfo | None = None

    # ------------------------------------------------------------ questions

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
        request = _requests.query(await self._optional(image), task, options)
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
        request = _requests.caption(await self.picture(image), task, options)
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
        request = _requests.detect(await self.picture(image), task, options)
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
        request = _requests.point(await self.picture(image), task, options)
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
        request = _requests.segment(await self.picture(image), task, options)
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
        request = _requests.run_tasks(await self._optional(image), tasks, options)
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
        `contextlib.closing`, or `aclosing` with asyncio, where that moment matters.
        """
        request = _requests.generate(await self._optional(image), task, options)
        data = await self._bytes_of(request)
        time_limit = self._settings.stream_timeout if timeout is None else timeout
        reader = _methods.EventReader()
        messages = self._transport.stream(_methods.GENERATE, data, time_limit)
        async with contextlib.aclosing(messages):
            async for message in messages:
                event = reader.read(message)
                if event is not None:
                    yield event
        yield reader.end()

    # ------------------------------------------------------------ pictures

    async def put_image(
        self, image: ImageInput, *, ttl: float | None = None, timeout: float | None = None
    ) -> HeldImage:
        """Upload a picture once, to ask about it many times.

        The value stands for the picture in every call. The server holds it for `ttl` seconds, or
        for its own default. The same bytes sent twice are one picture.
        """
        upload = await self._transport.run(lambda: Upload.of(to_image(image), ttl))
        response = await _until_answered(
            lambda left: self._transport.upload(_methods.PUT_IMAGE, upload.requests(), left),
            self._transport,
            self._settings.timeout if timeout is None else timeout,
        )
        return _methods.PUT_IMAGE.parse(response)

    async def delete_image(self, image: CachedImage | str, *, timeout: float | None = None) -> None:
        """Make the server forget a picture, by its value or id; NotFound when it is not held."""
        image_id = image.image_id if isinstance(image, CachedImage) else image
        request = image_pb2.DeleteImageRequest(image_id=image_id)
        await self._unary(_methods.DELETE_IMAGE, request, timeout)

    # ------------------------------------------------------------ the server

    async def server_info(self, *, timeout: float | None = None) -> _server.ServerInfo:
        """Version, limits and capabilities of the server.

        Raises ClientTooOld when the server no longer serves clients of this version.
        """
        request = server_pb2.GetServerInfoRequest()
        info = await self._unary(_methods.GET_SERVER_INFO, request, timeout)
        _server.check_client(info)
        self._server = info
        return info

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

    # ------------------------------------------------------------ how

    async def picture(self, image: ImageInput) -> media_pb2.Image:
        """The protobuf picture."""
        if is_ready(image):
            return to_image(image)
        return await self._transport.run(functools.partial(to_image, image))

    async def _optional(self, image: ImageInput | None) -> media_pb2.Image | None:
        return None if image is None else await self.picture(image)

    async def _unary(
        self,
        method: _methods.Method[ResponseT, ValueT],
        request: Message,
        timeout: float | None,
    ) -> ValueT:
        time_limit = self._settings.timeout if timeout is None else timeout
        data = await self._bytes_of(request)
        response = await _until_answered(
            functools.partial(self._transport.unary, method, data), self._transport, time_limit
        )
        return method.parse(response)

    async def _bytes_of(self, request: Message) -> bytes:
        """The request's bytes, once they are known to be few enough for the server."""
        data = _channel.serialize(request, self._settings.max_message_bytes)
        if len(data) > _channel.COMMON_REQUEST_BYTES:
            limits = (await self._known_server()).limits
            if limits.max_request_bytes:
                _channel.check_size(len(data), limits.max_request_bytes)
        return data

    async def _known_server(self) -> _server.ServerInfo:
        """What the server says of itself, asked once; nothing where it says nothing."""
        if self._server is None:
            try:
                self._server = await self.server_info()
            except (Unimplemented, PermissionDenied):
                self._server = _server.UNKNOWN
        return self._server


async def _until_answered(
    send: Callable[[float], Awaitable[ResponseT]], transport: Transport, timeout: float
) -> ResponseT:
    """The response of `send`, asked again while the server is busy and says for how long."""
    deadline = _channel.Deadline(timeout)
    for attempt in itertools.count(1):
        try:
            return await send(deadline.left())
        except Busy as busy:
            delay = _channel.busy_delay(busy, attempt, deadline.left())
            if delay is None:
                raise
        await transport.sleep(delay)
    raise AssertionError("unreachable: the last attempt returns or raises")
