"""The bytes of uploads that engines hold, for another engine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets

import structlog
from legato_engine.client.monitor import EngineState
from legato_engine.core.images import ImageSource
from legato_engine.core.request_key import RequestKey
from legato_engine.errors import ImageNotFound, LegatoError, Unavailable
from legato_engine.images.quota import ByteQuota
from legato_engine.ipc.commands import HoldImage
from legato_engine.shm.blob_store import BlobStore, KeptBlob

from legato_service.engine import Engine
from legato_service.engines.group import EngineGroup
from legato_service.images.intake import ImageFormat, as_source

log = structlog.get_logger("legato.service")

Key = tuple[str, str, str]
"""Tenant, image id, owner."""

_EMPTY = (EngineState.LOST, EngineState.STARTING)  # an engine that holds nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """What an engine has begun: for `ttl` seconds, within an owner's `quota_bytes`."""

    engine: Engine
    ttl: float
    quota_bytes: int


@dataclasses.dataclass(slots=True, eq=False)
class _HeldUpload:
    """`engine` holds the image while its process is that of `pid`."""

    blob: KeptBlob
    format: ImageFormat
    quota_bytes: int
    engine: Engine
    pid: int
    end: asyncio.TimerHandle

    @property
    def is_lost(self) -> bool:
        return self.engine.state in _EMPTY or self.engine.pid != self.pid


class HeldUploads:
    """Keeps what this process uploaded for the length of its hold. Belongs to one event loop.

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

    async def settled(self, key: Key) -> None:
        """Wait while the next engine is being asked to hold it; only then can it be let go."""
        if (asked := self._being_held.get(key)) is not None:
            await asked.wait()

    def restage(self, tenant: str, image_id: str) -> functools.partial[ImageSource] | None:
        """Return a function that stages the bytes of an image for an engine without it.

        It raises `ImageNotFound` while the engine that held the image runs: then the hold has
        ended.
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
            raise ImageNotFound("no image with this id is held", resource=image_id)
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
                engine = (await self._engines.hold(make)).engine
            except Unavailable:
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
