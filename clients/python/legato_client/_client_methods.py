# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""Calls of both clients, written once over a `Transport`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from legato.v1 import admin_pb2, image_pb2, media_pb2, server_pb2, task_pb2

from legato_client._errors import Busy, LegatoError, PermissionDenied, Unimplemented
from legato_client._grpc import channel
from legato_client._grpc.channel import to_bytes
from legato_client._grpc.settings import ClientSettings
from legato_client._grpc.transport import EventReader, Transport
from legato_client._images.sources import (
    CachedImage,
    HeldImage,
    ImageInput,
    SharedFrame,
    is_ready,
    shm_namespace,
    to_image,
)
from legato_client._proto import requests, responses, skills
from legato_client._proto.pieces import duration
from legato_client._proto.requests import Upload
from legato_client._types import results, server
from legato_client._types import tasks as _tasks

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")

_DEFAULT_SAMPLING = _tasks.Sampling()
_DEFAULT_OPTIONS = _tasks.Options()


class ClientMethods:
    """The calls, which `AsyncClient` inherits and `Client` shows as its own."""

    def __init__(self, settings: ClientSettings, transport: Transport) -> None:
        self._settings = settings
        self._transport = transport
        self._server: server.ServerInfo | None = None

    # ------------------------------------------------------------ questions

    async def query(
        self,
        image: _tasks.Images | None,
        question: str,
        *,
        reasoning: bool = False,
        spatial_refs: Sequence[_tasks.SpatialRef] = (),
        response_format: _tasks.ResponseFormat | None = None,
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> results.QueryResult:
        """Answer a question, about the image when there is one.

        A list is of several images, with `ClipFrame` for the frames of a clip, for a model that
        takes them (`ModelInfo.max_images`); else ValueError or `InvalidRequest`.
        """
        task = _tasks.QueryTask(
            question, reasoning, tuple(spatial_refs), sampling, response_format=response_format
        )
        return await self._ask(skills.QUERY, image, task, options, timeout)

    async def chat(
        self,
        messages: str | Sequence[_tasks.Message],
        *,
        reasoning: bool = False,
        response_format: _tasks.ResponseFormat | None = None,
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> results.QueryResult:
        """Answer the last question of a conversation, about the images that its messages show.

        A string is a conversation of this question alone.

        The server keeps nothing of it: the next call brings this answer as a message of the
        assistant. To stream, `generate` a `QueryTask` with these messages.
        """
        if isinstance(messages, str):
            messages = (_tasks.Message("user", messages),)
        task = _tasks.QueryTask(
            reasoning=reasoning,
            sampling=sampling,
            messages=tuple(messages),
            response_format=response_format,
        )
        return await self._ask(skills.QUERY, None, task, options, timeout)

    async def caption(
        self,
        image: ImageInput,
        length: _tasks.CaptionLength = "normal",
        *,
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> results.CaptionResult:
        """Describe the image."""
        task = _tasks.CaptionTask(length, sampling)
        return await self._ask(skills.CAPTION, image, task, options, timeout)

    async def detect(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        min_confidence: float | None = None,
        order: _tasks.ObjectOrder = "model",
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> results.DetectResult:
        """Box every instance of `object`."""
        task = _tasks.DetectTask(
            object, max_objects, sampling, min_confidence=min_confidence, order=order
        )
        return await self._ask(skills.DETECT, image, task, options, timeout)

    async def point(
        self,
        image: ImageInput,
        object: str,
        *,
        max_objects: int | None = None,
        spatial_refs: Sequence[_tasks.SpatialRef] = (),
        min_confidence: float | None = None,
        order: _tasks.ObjectOrder = "model",
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> results.PointResult:
        """Point at every instance of `object`."""
        task = _tasks.PointTask(
            object,
            max_objects,
            tuple(spatial_refs),
            sampling,
            min_confidence=min_confidence,
            order=order,
        )
        return await self._ask(skills.POINT, image, task, options, timeout)

    async def segment(
        self,
        image: ImageInput,
        object: str,
        *,
        spatial_refs: Sequence[_tasks.SpatialRef] = (),
        sampling: _tasks.Sampling = _DEFAULT_SAMPLING,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> results.SegmentResult:
        """Outline `object`."""
        task = _tasks.SegmentTask(object, tuple(spatial_refs), sampling)
        return await self._ask(skills.SEGMENT, image, task, options, timeout)

    async def run_tasks(
        self,
        image: ImageInput | None,
        tasks: Sequence[_tasks.Task],
        *,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> tuple[responses.TaskOutcome, ...]:
        """Run several tasks on one image, encoded once: one outcome per task, in the same order.

        A task that failed alone has its `LegatoError` as its outcome; nothing is raised for it.
        """
        shown, file = await self._image_or_file(image)
        request = requests.run_tasks(shown, tasks, options)
        return await self._unary(channel.RUN_TASKS, request, timeout, file)

    async def generate(
        self,
        image: _tasks.Images | None,
        task: _tasks.Task,
        *,
        options: _tasks.Options = _DEFAULT_OPTIONS,
        timeout: float | None = None,
    ) -> AsyncGenerator[results.Event, None]:
        """Yield the events of one task as they decode, `Finished` last.

        When the server is lost, another one of the same name continues, up to three times within
        `timeout`; no event is repeated. An image that only the lost server held is ImageNotFound.

        Leaving the loop early cancels the work on the server once this iterator is closed: use
        `contextlib.closing`, or `aclosing` with asyncio, where that moment matters.
        """
        shown, file, several = await self._shown(task, image)
        request = requests.generate(shown, task, options)
        if several:
            request.task.query.images.extend(several)
        request.checkpoints = True
        near = channel.of(request)
        data = await self._bytes_of(request, file)
        time_limit = self._settings.stream_timeout if timeout is None else timeout
        deadline, reader, addition = channel.Deadline(time_limit), EventReader(), b""
        while True:
            sent, left = data + addition, deadline.left()
            messages = self._transport.stream(channel.GENERATE, sent, left, near)
            try:
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        for event in reader.read(message):
                            yield event
                finished = reader.end()
                break
            except LegatoError as error:
                delay = reader.resumption(error, deadline.left())
                if delay is None:
                    raise
            await self._transport.sleep(delay)
            addition = reader.addition()
        yield finished

    async def _ask(
        self,
        skill: skills.Skill[skills.TaskT, skills.ResultT],
        image: _tasks.Images | None,
        task: skills.TaskT,
        options: _tasks.Options,
        timeout: float | None,
    ) -> skills.ResultT:
        shown, file, several = await self._shown(task, image)
        request = requests.question(shown, task, options)
        if several:
            request.images.extend(several)
        method = channel.OF_SKILLS[skill.name]
        answer: skills.ResultT = await self._unary(method, request, timeout, file)
        return answer

    async def _shown(
        self, task: _tasks.Task, images: _tasks.Images | None
    ) -> tuple[media_pb2.Image | None, bytes | None, list[task_pb2.QueryImage]]:
        """Return a task's one image as `_image_or_file` does, or several."""
        shown = skills.images_of(task, images)
        if len(shown) == 1 and not isinstance(shown[0], _tasks.ClipFrame):
            return *(await self._image_or_file(shown[0])), []
        return None, None, await self._query_images(shown)

    # ------------------------------------------------------------ images

    async def put_image(
        self, image: ImageInput, *, ttl: float | None = None, timeout: float | None = None
    ) -> HeldImage:
        """Upload an image once, to ask about it many times.

        The value stands for the image in every call. The server holds it for `ttl` seconds, or
        for its own default. The same bytes sent twice are one image.
        """
        upload = await self._transport.run(lambda: Upload.of(to_image(image), ttl))
        return await self._with_retries(
            channel.PUT_IMAGE,
            lambda left: self._transport.unary(
                channel.PUT_IMAGE, upload.requests(), left, upload.image_id
            ),
            timeout,
        )

    async def delete_image(self, image: CachedImage | str, *, timeout: float | None = None) -> None:
        """Make the server forget an image, by its value or id; NotFound when it is not held."""
        image_id = image.image_id if isinstance(image, CachedImage) else image
        request = image_pb2.DeleteImageRequest(image_id=image_id)
        await self._unary(channel.DELETE_IMAGE, request, timeout)

    # ------------------------------------------------------------ server

    async def server_info(self, *, timeout: float | None = None) -> server.ServerInfo:
        """Return the version, limits and capabilities of the server.

        Raises ClientTooOld when the server no longer serves clients of this version.
        """
        return await self._fetch_server(timeout)

    async def models(self, *, timeout: float | None = None) -> tuple[server.ModelInfo, ...]:
        """Return every served model, from all pages."""
        found: list[server.ModelInfo] = []
        page_token = ""
        while True:
            request = server_pb2.ListModelsRequest(page_token=page_token)
            page, page_token = await self._unary(channel.LIST_MODELS, request, timeout)
            found += page
            if not page_token:
                return tuple(found)

    # ------------------------------------------------------------ admin

    async def load(self, *, timeout: float | None = None) -> server.Load:
        """Return what the engine holds now; also answers while it is starting or lost."""
        return await self._unary(channel.GET_LOAD, admin_pb2.GetLoadRequest(), timeout)

    async def abort(
        self,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        everything: bool = False,
        timeout: float | None = None,
    ) -> server.AbortCount:
        """Stop a request, a session with all its work, or everything; name exactly one."""
        if (request_id is not None) + (session_id is not None) + everything != 1:
            raise ValueError("name either a request_id, or a session_id, or everything=True")
        target: dict[str, Any] = {"request_id": request_id, "session_id": session_id}
        if everything:
            target["all"] = True
        return await self._unary(channel.ABORT, admin_pb2.AbortRequest(**target), timeout)

    async def drain(
        self, grace: float | None = None, *, timeout: float | None = None
    ) -> server.Unfinished:
        """Shut the server down once running requests have ended, within `grace` seconds.

        None keeps the server's own grace. Returns at once, with the unfinished work.
        """
        request = admin_pb2.DrainRequest(grace=duration(grace))
        return await self._unary(channel.DRAIN, request, timeout)

    async def metrics(self, accept: str = "", *, timeout: float | None = None) -> str:
        """Return all metrics of the server in Prometheus text format, as a scrape gives them.

        `accept` chooses the format as HTTP's header does.
        """
        request = admin_pb2.GetMetricsRequest(accept=accept)
        return await self._unary(channel.GET_METRICS, request, timeout)

    async def set_pipeline_depth(self, depth: int, *, timeout: float | None = None) -> None:
        """Have every engine keep at most `depth` launches in flight: 1 blocks, 2 pipelines.

        Results stay the same. The engines follow at their next step. A server without the
        capability `pipeline_depth` raises Unimplemented.
        """
        request = admin_pb2.SetPipelineDepthRequest(depth=depth)
        await self._unary(channel.SET_PIPELINE_DEPTH, request, timeout)

    async def watch_timeline(
        self, seconds: float | None = None, *, timeout: float | None = None
    ) -> AsyncGenerator[server.TimelineUpdate, None]:
        """Stream the engine's launches, some 20 updates a second while it works.

        Ends after `seconds`; None watches until the iterator is closed, or `timeout`.
        """
        request = admin_pb2.WatchTimelineRequest(duration=duration(seconds))
        time_limit = self._settings.stream_timeout if timeout is None else timeout
        if seconds is not None and timeout is None:
            time_limit = seconds + self._settings.timeout
        data = request.SerializeToString()
        messages = self._transport.stream(channel.WATCH_TIMELINE, data, time_limit, "")
        async with contextlib.aclosing(messages):
            async for message in messages:
                yield channel.WATCH_TIMELINE.parse(message)

    # ------------------------------------------------------------ sending

    async def _image_message(self, image: ImageInput) -> media_pb2.Image:
        """Convert an image that a request can carry.

        A shared frame needs a server that reads this host's shared memory.
        """
        if isinstance(image, SharedFrame):
            server.check_shared_memory(await self._known_server(), shm_namespace())
        if is_ready(image):
            message = to_image(image)
        else:
            message = await self._transport.run(functools.partial(to_image, image))
        await self._check_size(message.ByteSize())
        return message

    async def _query_images(
        self, images: Sequence[ImageInput | _tasks.ClipFrame]
    ) -> list[task_pb2.QueryImage]:
        messages = []
        for each in images:
            shown, time = (
                (each.image, each.time) if isinstance(each, _tasks.ClipFrame) else (each, None)
            )
            image = await self._image_message(shown)
            messages.append(task_pb2.QueryImage(image=image, time=duration(time)))
        return messages

    async def _image_or_file(
        self, image: ImageInput | None
    ) -> tuple[media_pb2.Image | None, bytes | None]:
        """Return the image as a message, or an encoded file as its bytes, without a copy."""
        if image is None or isinstance(image, bytes):
            return None, image
        return await self._image_message(image), None

    async def _unary(
        self,
        method: channel.StubMethod[ResponseT, ValueT],
        request: Message,
        timeout: float | None,
        file: bytes | None = None,
    ) -> ValueT:
        """Run a unary call; `file` is the encoded image that the request lacks."""
        near = channel.of(request)
        data = await self._bytes_of(request, file)
        return await self._with_retries(
            method, lambda left: self._transport.unary(method, data, left, near), timeout
        )

    async def _with_retries(
        self,
        method: channel.StubMethod[ResponseT, ValueT],
        send: Callable[[float], Awaitable[ResponseT]],
        timeout: float | None,
    ) -> ValueT:
        """Wait for as long as a busy server asks, until the deadline; gRPC retries UNAVAILABLE."""
        deadline = channel.Deadline(self._settings.timeout if timeout is None else timeout)
        for attempt in itertools.count(1):
            try:
                return method.parse(await send(deadline.left()))
            except Busy as busy:
                delay = busy.retry_after
                if delay is None or attempt >= channel.MAX_ATTEMPTS or delay >= deadline.left():
                    raise
            await self._transport.sleep(delay)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _bytes_of(self, request: Message, file: bytes | None = None) -> bytes:
        """Serialize a request once for all attempts."""
        data = to_bytes(request, file)
        await self._check_size(len(data))
        return data

    async def _check_size(self, num_bytes: int) -> None:
        """Check the size of a request; only a large one is held to the server's own limit.

        In the transport it would fail as RESOURCE_EXHAUSTED without details, which looks like load,
        and end a session.
        """
        limit = self._settings.max_message_bytes
        if num_bytes > channel.COMMON_REQUEST_BYTES:
            limit = min(limit, (await self._known_server()).limits.max_request_bytes or limit)
        channel.check_size(num_bytes, limit)

    async def _known_server(self) -> server.ServerInfo:
        """Return the server's limits, fetched once; `UNKNOWN` if the server refuses."""
        if self._server is None:
            try:
                return await self._fetch_server(None)
            except (Unimplemented, PermissionDenied):
                self._server = server.UNKNOWN
        return self._server

    async def _fetch_server(self, timeout: float | None) -> server.ServerInfo:
        request = server_pb2.GetServerInfoRequest()
        info = await self._unary(channel.GET_SERVER_INFO, request, timeout)
        server.check_client(info)
        self._server = info
        return info
