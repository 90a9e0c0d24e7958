"""Handler of the commands that lease images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import structlog

from legato_engine.core.preprocessor import Preprocessor
from legato_engine.core.requests import PendingLease
from legato_engine.errors import InternalError, LegatoError, exhaustion, to_value
from legato_engine.images.cache import ImageKey, ImageLeases
from legato_engine.ipc.messages import (
    DropImage,
    EngineOutput,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
)
from legato_engine.models.frontend import PreparedImage
from legato_engine.types import RequestKey

_log = structlog.get_logger()


@dataclasses.dataclass(slots=True, eq=False)
class LeaseHandler:
    """Handler that answers each `HoldImage` and `DropImage` with one output."""

    preprocessor: Preprocessor
    table: ImageLeases[PreparedImage]
    _: dataclasses.KW_ONLY
    send: Callable[[EngineOutput], None]

    def start(self, command: HoldImage) -> PendingLease:
        """Start to prepare the image; the caller calls `finish` when that is done."""
        return PendingLease(
            request_id=command.request_id,
            tenant=command.request_id.tenant,
            command=command,
            image=self.preprocessor.start_lease(
                command.image, command.request_id.tenant, command.sha256
            ),
        )

    def finish(self, lease: PendingLease) -> None:
        command = lease.command
        failure = lease.image.exception()
        if failure is not None:  # not raised: its traceback would form a cycle with the lease
            self.fail(command.request_id, failure)
            return
        try:
            image = lease.image.result().image
            key = ImageKey(command.request_id.tenant, image.info.image_id)
            until = self.table.hold(
                key, image, image.num_bytes, command.owner, command.ttl, command.quota_bytes
            )
        except Exception as error:  # noqa: BLE001 - one caller's failure is its own
            self.fail(command.request_id, error)
            return
        self.send(ImageHeld(request_id=command.request_id, image=image.info, until=until))

    def drop(self, command: DropImage) -> None:
        try:
            key = ImageKey(command.request_id.tenant, command.image_id)
            self.table.drop(key, command.owner)
        except LegatoError as error:
            self.fail(command.request_id, error)
        else:
            self.send(ImageDropped(request_id=command.request_id))

    def fail(self, request_id: RequestKey, error: BaseException) -> None:
        if not isinstance(error, LegatoError):
            _log.error("image_lease_failed", request_id=request_id.name, exc_info=error)
            error = exhaustion(error) or InternalError("the image could not be held")
        self.send(Failed(request_id=request_id, error=to_value(error)))
