"""ImageService."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from google.protobuf import timestamp_pb2
from legato.v1 import image_pb2 as pb
from legato.v1 import image_pb2_grpc
from legato_engine.errors import (
    ClientTooSlow,
    DeadlineExceeded,
    ImageNotFound,
    ImageTooLarge,
    ImageUndecodable,
    InvalidField,
    InvalidRequest,
)
from legato_engine.images.memory import ByteQuota
from legato_engine.ipc.messages import DropImage, HoldImage, ImageHeld
from legato_engine.shm import BlobStore
from legato_engine.types import RequestKey

from legato_service.config import ServiceConfig
from legato_service.convert.responses import image_info
from legato_service.engines.group import EngineGroup
from legato_service.images.intake import HeldUploads, Hold, as_source
from legato_service.images.upload import (
    CHUNK,
    PartialUpload,
    UploadHeader,
    UploadLimits,
    read_header,
)
from legato_service.requests.dispatcher import bytes_key
from legato_service.requests.registry import RequestRegistry
from legato_service.rpc import call
from legato_service.rpc.call import Context, quota_owner


class ImageServicer(image_pb2_grpc.ImageServiceServicer):
    """Handlers of ImageService; only the engine knows which images are held.

    The bytes of uploads, in progress and held, have a quota of their own, as large as that of held
    images.
    """

    def __init__(
        self,
        config: ServiceConfig,
        engines: EngineGroup,
        blobs: BlobStore,
        registry: RequestRegistry,
        held: HeldUploads,
        quota: ByteQuota,
    ) -> None:
        self._engines = engines
        self._blobs = blobs
        self._registry = registry
        self._limits = UploadLimits(
            max_bytes=config.max_image_bytes,
            max_pixels=config.engine.max_image_pixels,
            ttl=config.image_ttl,
            max_ttl=config.image_max_ttl,
        )
        self._held = held
        self._quota = quota
        self._deadline = config.unary_deadline
        self._stall_timeout = config.stall_timeout

    async def PutImage(
        self, request_iterator: AsyncIterator[pb.PutImageRequest], context: Context
    ) -> pb.PutImageResponse:
        owner = quota_owner(context)
        async with self._admitted(context) as key:
            messages = aiter(request_iterator)
            header = read_header(await self._next(messages), self._limits)
            with PartialUpload.begin(
                header, self._limits, self._blobs, self._quota, owner
            ) as upload:
                while (message := await self._next(messages)) is not None:
                    await upload.add(message)
                # gRPC ends the messages of a cancelled call as if it were complete. The
                # cancellation follows, here or, after an Abort, within the hold.
                await asyncio.sleep(0)
                held = await self._hold(key, upload, header, owner)
        return pb.PutImageResponse(image=image_info(held.image), expire_time=_wall_time(held.until))

    async def DeleteImage(
        self, request: pb.DeleteImageRequest, context: Context
    ) -> pb.DeleteImageResponse:
        if not request.image_id:
            raise InvalidField("must not be empty", field="image_id")
        async with self._admitted(context) as key:
            await self._drop(key, request.image_id, quota_owner(context))
        return pb.DeleteImageResponse()

    async def _hold(
        self, key: RequestKey, upload: PartialUpload, header: UploadHeader, owner: str
    ) -> ImageHeld:
        image_format = upload.finish()
        principal = call.current().principal
        quota_bytes = 0 if principal is None else principal.quotas.image_bytes  # 0: the server's

        def make(blobs: BlobStore) -> HoldImage:
            return HoldImage(
                request_id=key,
                image=as_source(image_format, upload.writer.publish(blobs)),
                owner=owner,
                ttl=header.ttl,
                sha256=header.sha256,
                quota_bytes=quota_bytes,
            )

        try:
            holds = bytes_key(key.tenant, upload.writer.view())
            engine, held = await self._engines.hold(make, (holds,))
            hold = Hold(engine, header.ttl, quota_bytes)
            self._held.keep(
                upload.keep(), image_format, hold, (key.tenant, held.image.image_id, owner)
            )
            return held
        except (ImageUndecodable, ImageTooLarge) as error:
            error.metadata["field"] = CHUNK
            raise
        except InvalidRequest as error:
            error.metadata["field"] = f"header.{error.metadata.get('field', '')}"
            raise

    async def _drop(self, key: RequestKey, image_id: str, owner: str) -> None:
        kept_as = (key.tenant, image_id, owner)
        was_lost = self._held.drop(kept_as)
        await self._held.wait_registered(kept_as)
        try:
            await self._engines.drop(DropImage(request_id=key, image_id=image_id, owner=owner))
        except ImageNotFound:
            if not was_lost:
                raise

    async def _next(self, messages: AsyncIterator[pb.PutImageRequest]) -> pb.PutImageRequest | None:
        try:
            async with asyncio.timeout(self._stall_timeout):
                return await anext(messages, None)
        except TimeoutError:
            raise ClientTooSlow(
                f"no message was sent for {self._stall_timeout:g} s",
                limit_ms=round(self._stall_timeout * 1000),
            ) from None

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[RequestKey]:
        """Yield the call's key; end the block at the deadline, or when the request fails."""
        rpc = call.current()
        key = rpc.avoid(self._registry)
        with self._registry.admit(key) as active:
            # None without a deadline, despite grpc's annotation.
            given: float | None = context.time_remaining()
            left = self._deadline if given is None else given
            rpc.deadline = time.monotonic() + left
            timeout = asyncio.timeout(max(left, 0))
            active.on_fail = functools.partial(_end_now, timeout)
            try:
                async with timeout:
                    yield key
            except TimeoutError:
                raise active.failure or DeadlineExceeded("the deadline passed") from None
            finally:
                active.on_fail = None


def _end_now(timeout: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it has ended
        timeout.reschedule(asyncio.get_running_loop().time())


def _wall_time(monotonic: float) -> timestamp_pb2.Timestamp:
    moment = timestamp_pb2.Timestamp()
    moment.FromNanoseconds(time.time_ns() + round((monotonic - time.monotonic()) * 1e9))
    return moment
