"""Intake of images: headers, pixel layouts, quotas, held uploads."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import structlog
from legato.v1 import media_pb2
from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import EngineState
from legato_engine.errors import (
    EngineUnavailable,
    ImageTooLarge,
    ImageUndecodable,
    InvalidField,
    InvalidRequest,
    LegatoError,
)
from legato_engine.images import raw
from legato_engine.images.headers import inspect
from legato_engine.images.memory import ByteQuota
from legato_engine.ipc.messages import HoldImage
from legato_engine.shm import BlobStore, BlobWriter, KeptBlob
from legato_engine.types import (
    BlobRef,
    CachedImageRef,
    EncodedImage,
    ImageSource,
    PixelFormat,
    RawImage,
    RequestKey,
)

from legato_service.access.principal import SHARED_IMAGES
from legato_service.engines.group import EngineGroup
from legato_service.errors import Forbidden, SharedMemoryForbidden
from legato_service.rpc.call import CURRENT


def take_pixels(width: int, height: int) -> None:
    """Count a new image, once its size is known and before it is read further.

    Raises:
        QuotaExceeded: the call's credential has sent too many pixels.
    """
    rpc = CURRENT.get(None)
    if rpc is not None and rpc.principal is not None:
        rpc.principal.take_pixels(width * height)


# ---------------------------------------------------------------- headers

FileFields = tuple[str, str]
"""The request's fields with the bytes of a file and with their stated type."""


def file_type(
    data: bytes | memoryview, stated: str, *, max_bytes: int, max_pixels: int, fields: FileFields
) -> str:
    """Check an image file's header against the limits; return its MIME type.

    `stated` is the type according to the client, or empty.

    Raises:
        ImageUndecodable: the header is malformed, or of another type than stated.
        ImageTooLarge: the file is over a limit that its header shows.
        QuotaExceeded: the caller has sent too many pixels.
    """
    try:
        header = inspect(data, max_pixels=max_pixels, max_bytes=max_bytes)
    except InvalidRequest as error:
        error.metadata["field"] = fields[0]
        raise
    if stated and stated.lower() != header.mime_type:
        raise ImageUndecodable(
            f"the bytes are {header.mime_type}",
            field=fields[1],
            stated=stated,
            actual=header.mime_type,
        )
    take_pixels(header.width, header.height)
    return header.mime_type


# ---------------------------------------------------------------- pixel layout

_FORMATS = {media_pb2.PixelFormat.Value(f"PIXEL_FORMAT_{each.name}"): each for each in PixelFormat}


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The shape of raw pixels."""

    width: int
    height: int
    row_stride: int
    format: PixelFormat

    @property
    def num_bytes(self) -> int:
        return raw.num_bytes(self.format, self.width, self.height, self.row_stride)


def read_layout(message: media_pb2.PixelLayout, field: str) -> Layout:
    if message.format not in _FORMATS:
        known = ", ".join(pixel_format.name for pixel_format in PixelFormat)
        raise InvalidField(f"must be one of {known}", field=f"{field}.format")
    pixel_format = _FORMATS[message.format]
    stride = message.row_stride_bytes or raw.row_bytes(pixel_format, message.width)
    try:
        raw.check_layout(pixel_format, message.width, message.height, stride)
    except InvalidField as error:
        error.metadata["field"] = f"{field}.{error.metadata['field']}"
        raise
    return Layout(message.width, message.height, stride, pixel_format)


def check_size(actual: int, limit: int, unit: str, field: str) -> None:
    if actual > limit:
        raise ImageTooLarge(
            f"the image has {actual} {unit}, the limit is {limit}",
            field=field,
            limit=limit,
            actual=actual,
            unit=unit,
        )


def check_complete(layout: Layout, actual: int, field: str) -> None:
    if actual < layout.num_bytes:
        raise ImageUndecodable(
            f"{layout.num_bytes} bytes needed, {actual} given",
            field=field,
            limit=layout.num_bytes,
            actual=actual,
        )


# ---------------------------------------------------------------- held uploads

log = structlog.get_logger("legato.service")

Key = tuple[str, str, str]
"""Tenant, image id, owner."""

_EMPTY = (EngineState.LOST, EngineState.STARTING)  # an engine that holds nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """Lease of a held image: for `ttl` seconds, within an owner's `quota_bytes`."""

    engine: EngineConnection
    ttl: float
    quota_bytes: int


@dataclasses.dataclass(slots=True, eq=False)
class _HeldUpload:
    """`engine` holds the image while its process is that of `pid`."""

    blob: KeptBlob
    format: ImageFormat
    quota_bytes: int
    engine: EngineConnection
    pid: int
    end: asyncio.TimerHandle

    @property
    def is_lost(self) -> bool:
        return self.engine.state in _EMPTY or self.engine.pid != self.pid


class HeldUploads:
    """Uploads of this process, kept for the length of their hold. Belongs to one event loop.

    Holds end with their engine. Another one, or the next, is asked to hold the images again, one
    after another, and requests that name one meanwhile bring its bytes. The bytes count against
    `quota`, as those of uploads in progress.
    """

    def __init__(self, engines: EngineGroup, quota: ByteQuota) -> None:
        self._engines = engines
        self._quota = quota
        self._held: dict[Key, _HeldUpload] = {}
        self._owners: dict[tuple[str, str], set[Key]] = {}  # by tenant and image id
        self._holding: asyncio.Task[None] | None = None
        self._being_held: dict[Key, asyncio.Event] = {}
        engines.subscribe(self._on_state)

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, blob: KeptBlob, image_format: ImageFormat, hold: Hold, key: Key) -> None:
        """Take over the blob and its quota."""
        self.drop(key)
        end = asyncio.get_running_loop().call_later(hold.ttl, self.drop, key)
        pid = hold.engine.pid
        self._held[key] = _HeldUpload(blob, image_format, hold.quota_bytes, hold.engine, pid, end)
        self._owners.setdefault(key[:2], set()).add(key)

    def drop(self, key: Key) -> bool:
        """Return whether it was kept for an engine that is gone."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        owners = self._owners[key[:2]]
        owners.remove(key)
        if not owners:
            del self._owners[key[:2]]
        held.end.cancel()
        held.blob.close()
        self._quota.release(key[2], held.blob.size)
        return held.is_lost

    async def wait_registered(self, key: Key) -> None:
        """Wait for re-registration before releasing it."""
        if (asked := self._being_held.get(key)) is not None:
            await asked.wait()

    def restage(self, tenant: str, image_id: str) -> functools.partial[ImageSource] | None:
        """Return a function that stages the bytes of an image for an engine without it.

        It only names the image while the engine that held it runs, which finds it or not.
        """
        key = next(iter(self._owners.get((tenant, image_id), ())), None)
        return None if key is None else functools.partial(self._stage, self._held[key], image_id)

    def close(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
        for key in list(self._held):
            self.drop(key)

    @staticmethod
    def _stage(held: _HeldUpload, image_id: str, blobs: BlobStore) -> ImageSource:
        if not held.is_lost or held.blob.closed:
            return CachedImageRef(image_id=image_id)
        return as_source(held.format, held.blob.publish(blobs))

    # ------------------------------------------------------------ another engine

    def _on_state(self, state: EngineState) -> None:
        lost = any(held.is_lost for held in self._held.values())
        idle = self._holding is None or self._holding.done()
        if state is EngineState.READY and lost and idle:
            self._holding = asyncio.create_task(self._hold_again(), name="hold again")

    async def _hold_again(self) -> None:
        for key, held in list(self._held.items()):
            if self._held.get(key) is not held or not held.is_lost:
                continue
            make = functools.partial(self._command, key, held)
            asked = self._being_held[key] = asyncio.Event()
            try:
                engine, _ = await self._engines.hold(make)
            except EngineUnavailable:
                return  # the next `READY` begins again
            except LegatoError as error:
                log.warning("upload_not_held_again", image_id=key[1], reason=str(error))
                self.drop(key)
            else:
                held.engine, held.pid = engine, engine.pid
            finally:
                del self._being_held[key]
                asked.set()

    @staticmethod
    def _command(key: Key, held: _HeldUpload, blobs: BlobStore) -> HoldImage:
        tenant, _, owner = key
        left = held.end.when() - asyncio.get_running_loop().time()
        return HoldImage(
            request_id=RequestKey(f"!{secrets.token_hex(8)}", tenant),  # no caller's id
            image=as_source(held.format, held.blob.publish(blobs)),
            owner=owner,
            ttl=max(left, 0.0),
            quota_bytes=held.quota_bytes,
        )


# ---------------------------------------------------------------- intake

ImageFormat = str | Layout
"""The MIME type of a file, or the layout of raw pixels."""


class InlineImage(msgspec.Struct, frozen=True):
    """Bytes that came with the request."""

    data: bytes
    format: ImageFormat

    @property
    def field(self) -> str:
        return "image.encoded.data" if isinstance(self.format, str) else "image.raw.data"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BlobImage:
    """Bytes in shared memory, freed with the last reference to this."""

    writer: BlobWriter
    format: ImageFormat
    field: str


NewImage = InlineImage | BlobImage
"""An image that the engine may not have."""

CheckedImage = NewImage | CachedImageRef | None
"""The image of a request, if any, within the limits."""


ReadShared = Callable[[media_pb2.SharedImage], Awaitable[BlobImage]]
"""The type of `shared_memory.SharedMemory.read`."""


def stage(image: NewImage | CachedImageRef, blobs: BlobStore) -> ImageSource:
    """Stage the bytes in the store of an engine; its `submit` discards the blob."""
    match image:
        case InlineImage():
            return as_source(image.format, blobs.put(image.data))
        case BlobImage():
            return as_source(image.format, image.writer.publish(blobs))
    return image


def stage_all(
    images: Sequence[NewImage | CachedImageRef],
    blobs: BlobStore,
    held: Mapping[int, Callable[[BlobStore], ImageSource]],
) -> list[ImageSource]:
    """Stage images, those of `held` by its functions, by index; if one fails, none is left."""
    staged: list[ImageSource] = []
    try:
        for index, image in enumerate(images):
            staged.append(held[index](blobs) if index in held else stage(image, blobs))
    except BaseException:
        for each in staged:
            if not isinstance(each, CachedImageRef):
                blobs.discard(each.blob)
        raise
    return staged


def as_source(image_format: ImageFormat, blob: BlobRef) -> EncodedImage | RawImage:
    if isinstance(image_format, str):
        return EncodedImage(blob=blob, mime_type=image_format)
    return RawImage(
        blob=blob,
        width=image_format.width,
        height=image_format.height,
        row_stride=image_format.row_stride,
        format=image_format.format,
    )


class ImageIntake:
    """Check of images against the limits."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_pixels: int,
        read_shared: ReadShared | None = None,
    ) -> None:
        self._read_shared = read_shared
        self._max_bytes = max_bytes
        self._max_pixels = max_pixels

    async def check_all(
        self, images: Sequence[media_pb2.Image], path: str = ""
    ) -> Sequence[CheckedImage]:
        """Check one image, or several of a query at `path`; raise as `check`."""
        if len(images) == 1:
            return (await self.check(images[0]),)
        checked: list[CheckedImage] = []
        for index, image in enumerate(images):
            try:
                checked.append(await self.check(image))
            except LegatoError as error:
                if (field := str(error.metadata.get("field", ""))).startswith("image"):
                    error.metadata["field"] = f"{path}images[{index}].{field}"
                raise
        return checked

    async def check(self, image: media_pb2.Image) -> CheckedImage:
        """Check the image of a request, if any.

        Raises:
            InvalidField: a field is malformed.
            ImageUndecodable: the bytes are not an image of the stated form.
            ImageTooLarge: the image has too many bytes or pixels.
            QuotaExceeded: the caller has sent too many pixels.
            Forbidden: the credential lacks the scope to name regions of shared memory.
            SharedMemoryForbidden: its region must not be read.
            SharedMemoryTorn: its slot was written meanwhile.
        """
        match image.WhichOneof("source"):
            case "encoded":
                return self._encoded(image.encoded)
            case "raw":
                return self._raw(image.raw)
            case "image_id":
                if not image.image_id:
                    raise InvalidField("must not be empty", field="image.image_id")
                return CachedImageRef(image_id=image.image_id)
            case "shared":
                if self._read_shared is None:
                    raise SharedMemoryForbidden(
                        "shared images are off; send the bytes", region=image.shared.region
                    )
                _check_may_share()
                return await self._read_shared(image.shared)
            case None:
                return None

    def _encoded(self, encoded: media_pb2.EncodedImage) -> InlineImage:
        data = encoded.data  # every access copies the bytes
        self._check_carried(len(data), "image.encoded.data")
        mime_type = file_type(
            data,
            encoded.mime_type,
            max_bytes=self._max_bytes,
            max_pixels=self._max_pixels,
            fields=("image.encoded.data", "image.encoded.mime_type"),
        )
        return InlineImage(data, mime_type)

    def _raw(self, raw: media_pb2.RawImage) -> InlineImage:
        data = raw.data  # every access copies the bytes
        layout = read_layout(raw.layout, "image.raw.layout")
        check_size(layout.width * layout.height, self._max_pixels, "pixels", "image.raw")
        self._check_carried(len(data), "image.raw")
        check_complete(layout, len(data), "image.raw.data")
        take_pixels(layout.width, layout.height)
        return InlineImage(data, layout)

    def _check_carried(self, num_bytes: int, field: str) -> None:
        if num_bytes > self._max_bytes:
            raise ImageTooLarge(
                f"the image has {num_bytes} bytes, a request carries up to {self._max_bytes}: "
                "upload it with PutImage",
                field=field,
                limit=self._max_bytes,
                actual=num_bytes,
                unit="bytes",
            )


def _check_may_share() -> None:
    """Check the tenant's right to share memory: regions are read as the server's own user."""
    rpc = CURRENT.get(None)
    if rpc is None or rpc.principal is None or SHARED_IMAGES in rpc.principal.scopes:
        return
    raise Forbidden(f"the credential lacks the scope {SHARED_IMAGES}", scope=SHARED_IMAGES)
