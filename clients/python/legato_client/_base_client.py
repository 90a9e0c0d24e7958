# ruff: noqa: ASYNC109 - `timeout` is the gRPC deadline: the server must know it too
"""State that all calls of a client share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from google.protobuf.message import Message
from legato.v1 import media_pb2, server_pb2, task_pb2

from legato_client._errors import Busy, PermissionDenied, Unimplemented
from legato_client._grpc import channel
from legato_client._grpc.channel import to_bytes
from legato_client._grpc.settings import ClientSettings
from legato_client._grpc.transport import Transport
from legato_client._images.sources import ImageInput, SharedFrame, is_ready, shm_namespace, to_image
from legato_client._proto import pieces
from legato_client._types import server
from legato_client._types.tasks import ClipFrame

ResponseT = TypeVar("ResponseT", bound=Message)
ValueT = TypeVar("ValueT")


class BaseClient:
    """Base of both clients, which sends requests over a transport."""

    def __init__(self, settings: ClientSettings, transport: Transport) -> None:
        self._settings = settings
        self._transport = transport
        self._server: server.ServerInfo | None = None

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
        self, images: Sequence[ImageInput | ClipFrame]
    ) -> list[task_pb2.QueryImage]:
        messages = []
        for each in images:
            shown, time = (each.image, each.time) if isinstance(each, ClipFrame) else (each, None)
            image = await self._image_message(shown)
            messages.append(task_pb2.QueryImage(image=image, time=pieces.duration(time)))
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
        """Wait for as long as a busy server asks, until the deadline."""
        deadline = channel.Deadline(self._settings.timeout if timeout is None else timeout)
        for attempt in itertools.count(1):
            try:
                return method.parse(await send(deadline.left()))
            except Busy as busy:
                delay = channel.busy_delay(busy, attempt, deadline.left())
                if delay is None:
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
