"""Runs the frames of a session."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import msgspec
import structlog
from legato_engine.core.images import CachedImage
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request
from legato_engine.errors import InternalError, InvalidField, LegatoError
from legato_engine.ipc.messages import Done, Started

from legato_service.engine import Stream
from legato_service.images.intake import CheckedImage, NewImage
from legato_service.requests.dispatcher import Dispatcher, follow
from legato_service.requests.registry import ActiveRequest
from legato_service.requests.shared_image import SHARED_FAILURES, cached_image
from legato_service.rpc import call
from legato_service.session.frame import Outcome, Output
from legato_service.session.frame_planner import FrameRequest

log = structlog.get_logger("legato.session")

ImageResult = asyncio.Future[CachedImage | LegatoError | None]
"""Set by the task with the image's bytes: the cached image, or the failure that tasks share."""


class FrameListener(Protocol):
    """Receives the progress of running frames, as `SessionCore` does."""

    def image_ready(self, frame: FrameRequest) -> None: ...

    def output(self, frame: FrameRequest, index: int, output: Output) -> None: ...

    def ended(self, frame: FrameRequest, index: int, outcome: Outcome) -> None: ...


class FrameRunner:
    """Runs the frames of one session, each for at most `frame_deadline` seconds.

    The session is its listener and owns it, and shuts it down at the end of the call; only running
    frames refer back to the listener.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        listener: FrameListener,
        session_id: str,
        *,
        frame_deadline: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._listener = weakref.ref(listener)
        self._session_id = session_id
        self._frame_deadline = frame_deadline
        self._runs: dict[FrameRequest, FrameRun] = {}
        self._shut_down = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, frame: FrameRequest) -> None:
        listener = self._listener()
        if self._shut_down or listener is None:
            return
        key = RequestKey(self._session_id, part=str(frame.sequence))
        deadline = time.monotonic() + self._frame_deadline
        run = FrameRun(self._dispatcher, listener, frame, key, deadline)
        self._runs[frame] = run
        task = asyncio.create_task(run.run(), name=f"frame {key.name}")
        run.cancel = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._runs.pop(frame, None))

    def stop(self, frame: FrameRequest, index: int) -> None:
        if frame in self._runs:
            self._runs[frame].stop(index)

    def abort(self, frame: FrameRequest) -> None:
        """Idempotent."""
        if frame in self._runs:
            self._runs.pop(frame).abort()

    def shut_down(self) -> None:
        """Abort all frames at once. Idempotent.

        The end of a frame lets a waiting one start, which would outlive the runner otherwise.
        """
        self._shut_down = True
        for frame in list(self._runs):
            self.abort(frame)

    async def wait_stopped(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


class FrameRun:
    """A running frame. `cancel` cancels its asyncio task."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        listener: FrameListener,
        frame: FrameRequest,
        key: RequestKey,
        deadline: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._listener = listener
        self._frame = frame
        self._key = key
        self._deadline = deadline
        self._streams: dict[int, Stream] = {}
        self._stopped: set[int] = set()
        self.cancel: Callable[[], object] = lambda: None

    def stop(self, index: int) -> None:
        self._stopped.add(index)
        if index in self._streams:
            self._streams[index].stop()

    def abort(self) -> None:
        for stream in self._streams.values():
            stream.abort()
        self.cancel()

    async def run(self) -> None:
        """Give every task an outcome, unless this is cancelled."""
        try:
            image = await self._read_image()
            async with asyncio.TaskGroup() as group:
                await self._start_tasks(image, group)
        except Exception as error:
            log.error("uncaught_exception", request_id=self._key.name, exc_info=error)
            for index in range(len(self._frame.tasks)):  # earlier outcomes stay
                self._listener.ended(self._frame, index, InternalError("a frame could not be run"))
        finally:
            del self._listener  # a cancelled task group keeps its stack frames, and so this object

    async def _read_image(self) -> CheckedImage | LegatoError:
        message, self._frame.image = self._frame.image, None
        image: CheckedImage | LegatoError = None
        try:
            if message is not None:
                image = await self._dispatcher.images.check(message)
            if image is None:
                image = InvalidField("a frame needs an image", field="image")
        except LegatoError as error:
            image = error
        self._listener.image_ready(self._frame)
        return image

    async def _start_tasks(
        self, image: CheckedImage | LegatoError, group: asyncio.TaskGroup
    ) -> None:
        """The first task carries the image's bytes; the others refer to it."""
        last = len(self._frame.tasks) - 1
        original = None if isinstance(image, LegatoError) else image
        for index, task in enumerate(self._frame.tasks):
            request = task.request
            if isinstance(request, LegatoError):
                self._listener.ended(self._frame, index, request)
            elif isinstance(image, LegatoError):
                self._listener.ended(self._frame, index, _with_session_field(image))
            else:
                cached: ImageResult = asyncio.get_running_loop().create_future()
                group.create_task(self._run_task(index, request, image, cached, original))
                if isinstance(image, NewImage) and index < last:
                    image = await cached or image

    async def _run_task(
        self,
        index: int,
        request: Request,
        image: CheckedImage,
        cached: ImageResult,
        original: CheckedImage,
    ) -> None:
        outcome: Outcome = None
        try:
            if index not in self._stopped:
                outcome = await self._follow(index, request, image, cached, original)
        except LegatoError as error:
            outcome = _with_session_field(error)
        if not cached.done():
            cached.set_result(outcome if isinstance(outcome, SHARED_FAILURES) else None)
        self._listener.ended(self._frame, index, outcome)

    async def _follow(
        self,
        index: int,
        request: Request,
        image: CheckedImage,
        cached: ImageResult,
        original: CheckedImage,
    ) -> Done:
        part = f"{self._key.part}.{index}"
        key = RequestKey(self._key.caller_id, call.current().tenant, part)
        request = msgspec.structs.replace(request, request_id=key)
        with ActiveRequest(self._deadline) as active:
            stream = self._streams[index] = self._dispatcher.submit(
                request, image, active, original=original, may_wait=index > 0
            )
            async with aclosing(follow(stream)) as outputs:
                async for output in outputs:
                    if isinstance(output, Done):
                        return output
                    if isinstance(output, Started) and not cached.done():
                        cached.set_result(cached_image(output))
                    if request.deltas and output is not None:
                        self._listener.output(self._frame, index, output)
        raise InternalError("a stream ended without its result")


def _with_session_field(error: LegatoError) -> LegatoError:
    field = error.metadata.get("field", "")
    if field.split(".")[0] == "image":
        error.metadata["field"] = f"frame.{field}"
    elif field == "options.adapter":
        error.metadata["field"] = "open.adapter"
    return error
