"""Pictures on their way to being held: decoded on the preprocess threads, and then pinned."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Iterator

import structlog

from legato_engine.engine.preprocessor import Picture, Preprocessor
from legato_engine.errors import InternalError, LegatoError, to_value
from legato_engine.images.leases import ImageLeases
from legato_engine.ipc.messages import (
    DropImage,
    EngineOutput,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
)
from legato_engine.models.frontend import PreparedImage

_log = structlog.get_logger()
_Future = concurrent.futures.Future[Picture]


class PendingLeases:
    """Answers `HoldImage` and `DropImage` by one report each.

    All methods belong to the engine's main thread; `wake` is called from others when a picture is
    prepared, so that a sleeping loop calls `step`.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        holds: ImageLeases[PreparedImage],
        *,
        send: Callable[[EngineOutput], None],
        wake: Callable[[], None],
    ) -> None:
        self._preprocessor = preprocessor
        self._holds = holds
        self._send = send
        self._wake = wake
        self._jobs: dict[str, tuple[HoldImage, _Future]] = {}
        self._prepared: collections.deque[tuple[str, _Future]] = collections.deque()

    @property
    def owners(self) -> Iterator[str]:
        """Whose pictures are under way, one by one."""
        return (command.owner for command, _ in self._jobs.values())

    @property
    def ready(self) -> bool:
        """Whether a prepared picture waits for `step`."""
        return bool(self._prepared)

    @property
    def next_expiry(self) -> float:
        """When `step` is due even if nothing else happens, monotonic seconds."""
        return self._holds.next_expiry

    def hold(self, command: HoldImage) -> None:
        """Begin to prepare a picture; `step` reports how that ended."""
        future = self._preprocessor.start_held(command.image, command.sha256)
        self._jobs[command.request_id] = (command, future)
        # Like the engine's own, this callback must not hold the future and its picture.
        future.add_done_callback(functools.partial(self._on_prepared, command.request_id))

    def drop(self, command: DropImage) -> None:
        """End a caller's hold, or forget a picture that nobody holds."""
        try:
            self._holds.drop(command.image_id, command.owner)
        except LegatoError as error:
            self.fail(command.request_id, error)
        else:
            self._send(ImageDropped(request_id=command.request_id))

    def abort(self, request_id: str) -> bool:
        """Forget a hold that is under way; whether there was one. It gets no report."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        job[1].cancel()
        return True

    def expire(self) -> None:
        """Let go what is over: who asks for it later is told that it is gone."""
        self._holds.expire()

    def step(self) -> None:
        """Pin what is prepared and let go what is over."""
        self.expire()
        while self._prepared:
            request_id, future = self._prepared.popleft()
            job = self._jobs.get(request_id)
            if job is not None and job[1] is future:  # else aborted meanwhile
                del self._jobs[request_id]
                self._finish(job[0], future)

    def fail(self, request_id: str, error: Exception) -> None:
        """Report that a command failed."""
        if not isinstance(error, LegatoError):
            _log.error("holding an image failed", request_id=request_id, exc_info=error)
            error = InternalError("the image could not be held")
        self._send(Failed(request_id=request_id, error=to_value(error)))

    def _on_prepared(self, request_id: str, future: _Future) -> None:
        """Runs on a preprocess thread, or on this one when the job was cancelled."""
        self._prepared.append((request_id, future))
        self._wake()

    def _finish(self, command: HoldImage, future: _Future) -> None:
        try:
            image = future.result().image
            until = self._holds.hold(
                image.info.image_id, image, image.num_bytes, command.owner, command.ttl
            )
        except Exception as error:  # noqa: BLE001 - one caller's failure is its own
            self.fail(command.request_id, error)
            return
        self._send(ImageHeld(request_id=command.request_id, image=image.info, until=until))
