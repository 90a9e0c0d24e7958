"""Runs the frames of a session: the picture taken in once, its tasks side by side."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import msgspec
import structlog
from legato_engine import core
from legato_engine.errors import InternalError, InvalidField, LegatoError
from legato_engine.ipc.messages import Done, Started

from legato_service.engine import Stream
from legato_service.images.intake import NewPicture, Picture
from legato_service.requests.dispatcher import Dispatcher, follow
from legato_service.requests.registry import ActiveRequest
from legato_service.requests.shared_image import SHARED_FAILURES, held_name
from legato_service.rpc import call
from legato_service.session.frame import Outcome, Report
from legato_service.session.plan import Job

log = structlog.get_logger("legato.session")

Begun = asyncio.Future[core.CachedImage | LegatoError | None]
"""What later tasks learn from the one that carries the bytes: their name, or that they are bad."""


class Listener(Protocol):
    """Hears of frames that run; `SessionCore` says what each call means."""

    def taken(self, job: Job) -> None:
        """The picture was taken in."""
        ...

    def report(self, job: Job, index: int, report: Report) -> None:
        """A task said something on its way."""
        ...

    def ended(self, job: Job, index: int, outcome: Outcome) -> None:
        """A task ended."""
        ...


class FrameRunner:
    """The workers of one session. A frame may run for `patience` seconds.

    The end of the call, its deadline included, is not theirs to know: it aborts them all. The
    listener owns them; only a frame that runs holds the listener.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        listener: Listener,
        session_id: str,
        *,
        patience: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._listener = weakref.ref(listener)
        self._session_id = session_id
        self._patience = patience
        self._runs: dict[Job, FrameRun] = {}
        self._dismissed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, job: Job) -> None:
        """Run a frame, unless all were dismissed."""
        listener = self._listener()
        if self._dismissed or listener is None:
            return
        key = core.RequestKey(self._session_id, part=str(job.sequence))
        deadline = time.monotonic() + self._patience
        run = FrameRun(self._dispatcher, listener, job, key, deadline)
        self._runs[job] = run
        task = asyncio.create_task(run.run(), name=f"frame {key.name}")
        run.cancel = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._runs.pop(job, None))

    def stop(self, job: Job, index: int) -> None:
        """End a task with what it has."""
        if job in self._runs:
            self._runs[job].stop(index)

    def abort(self, job: Job) -> None:
        """Forget a frame."""
        if job in self._runs:
            self._runs.pop(job).abort()

    def dismiss(self) -> None:
        """Forget all frames, at once, and start none any more. Idempotent.

        The end of a frame makes room for one that waits: without this, the next would start while
        the others are being forgotten, and outlive them all.
        """
        self._dismissed = True
        for job in list(self._runs):
            self.abort(job)

    async def gone(self) -> None:
        """Until what was aborted is out of the way."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class FrameRun:
    """One frame under way. `cancel` ends its asyncio task."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        listener: Listener,
        job: Job,
        key: core.RequestKey,
        deadline: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._listener = listener
        self._job = job
        self._key = key
        self._deadline = deadline
        self._streams: dict[int, Stream] = {}
        self._stopped: set[int] = set()
        self.cancel: Callable[[], object] = lambda: None

    def stop(self, index: int) -> None:
        """End a task with what it has, which is nothing where it has not begun."""
        self._stopped.add(index)
        if index in self._streams:
            self._streams[index].stop()

    def abort(self) -> None:
        """Have the engine forget the frame, at once."""
        for stream in self._streams.values():
            stream.abort()
        self.cancel()

    async def run(self) -> None:
        """Every task ends, whatever happens, unless this is cancelled."""
        try:
            picture = await self._take_in()
            async with asyncio.TaskGroup() as group:
                await self._begin_all(picture, group)
        except Exception as error:
            log.error("uncaught_exception", request_id=self._key.name, exc_info=error)
            for index in range(len(self._job.tasks)):  # those that ended stay as they are
                self._listener.ended(self._job, index, InternalError("a frame could not be run"))
        finally:
            del self._listener  # a cancelled task group keeps its frames, and so this one

    async def _take_in(self) -> Picture | LegatoError:
        """The picture, its bytes ours from here on; or what is wrong with it."""
        image, self._job.image = self._job.image, None
        picture: Picture | LegatoError = None
        try:
            if image is not None:
                picture = await self._dispatcher.pictures.check(image)
            if picture is None:
                picture = InvalidField("a frame needs a picture", field="image")
        except LegatoError as error:
            picture = error
        self._listener.taken(self._job)
        return picture

    async def _begin_all(self, picture: Picture | LegatoError, group: asyncio.TaskGroup) -> None:
        """Begin every task; those after the first that carries bytes name what it brought in."""
        last = len(self._job.tasks) - 1
        for index, task in enumerate(self._job.tasks):
            asked = task.asked
            if isinstance(asked, LegatoError):
                self._listener.ended(self._job, index, asked)
            elif isinstance(picture, LegatoError):
                self._listener.ended(self._job, index, _placed(picture))
            else:
                begun: Begun = asyncio.get_running_loop().create_future()
                group.create_task(self._work(index, asked, picture, begun))
                if isinstance(picture, NewPicture) and index < last:
                    picture = await begun or picture

    async def _work(self, index: int, asked: core.Request, picture: Picture, begun: Begun) -> None:
        outcome: Outcome = None
        try:
            if index not in self._stopped:
                outcome = await self._follow(index, asked, picture, begun)
        except LegatoError as error:
            outcome = _placed(error)
        if not begun.done():
            begun.set_result(outcome if isinstance(outcome, SHARED_FAILURES) else None)
        self._listener.ended(self._job, index, outcome)

    async def _follow(
        self, index: int, asked: core.Request, picture: Picture, begun: Begun
    ) -> Done:
        part = f"{self._key.part}.{index}"
        key = core.RequestKey(self._key.caller_id, call.current().tenant, part)
        request = msgspec.structs.replace(asked, request_id=key)
        with ActiveRequest(self._deadline) as visit:
            stream = self._streams[index] = self._dispatcher.submit(request, picture, visit)
            async with aclosing(follow(stream)) as reports:
                async for report in reports:
                    if isinstance(report, Done):
                        return report
                    if isinstance(report, Started) and not begun.done():
                        begun.set_result(held_name(report))
                    if asked.deltas and report is not None:
                        self._listener.report(self._job, index, report)
        raise InternalError("a stream ended without its result")


def _placed(error: LegatoError) -> LegatoError:
    """The same error, its field named from the session's message on."""
    field = error.metadata.get("field", "")
    if field.split(".")[0] == "image":
        error.metadata["field"] = f"frame.{field}"
    elif field == "options.adapter":
        error.metadata["field"] = "open.adapter"
    return error
