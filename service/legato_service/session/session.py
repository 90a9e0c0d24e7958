"""Session lifecycle, the run of its frames, and the registry of open sessions."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager

import msgspec
import structlog
from legato.v1 import session_pb2 as pb
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import (
    Draining,
    InternalError,
    InvalidField,
    LegatoError,
    SessionOutOfOrder,
    StoppedByOperator,
)
from legato_engine.ipc.messages import Done, PrefillStarted
from legato_engine.types import CachedImageRef, Request, RequestKey

from legato_service.convert import requests
from legato_service.convert.responses import duration
from legato_service.errors import SessionsFull, failure
from legato_service.images.intake import CheckedImage, NewImage
from legato_service.requests.dispatcher import SHARED_FAILURES, Dispatcher, cached_image, follow
from legato_service.requests.registry import ActiveRequest
from legato_service.rpc import call
from legato_service.session import conversion
from legato_service.session.core import Outcome, Output, SessionCore, SessionTotals
from legato_service.session.frames import FramePlanner, FrameRequest
from legato_service.version import CONTRACT_REVISION

log = structlog.get_logger("legato.session")

DEFAULT_HEARTBEAT = 10.0  # seconds
STOP_GRACE = 1.0
"""Seconds, at the end of the time left, in which stopped work returns its partial results."""
IDLE_LINGER = 0.25
"""Seconds between `go_away` and the end of an idle session, for frames on their way."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The limits of every session, in seconds."""

    open_timeout: float = 10.0
    credit_timeout: float = 30.0
    frame_deadline: float = 60.0
    max_age: float = 3600.0  # less up to a tenth, so that sessions do not all end at once
    final_grace: float = 30.0  # for running work at the greatest age


class SessionDriver:
    """Session of one call. Iterate `messages` once; what it raises ends the call.

    Times are `time.monotonic()` seconds.

    Raises:
        LegatoError: the opening is malformed or cannot be served.
    """

    def __init__(
        self,
        session_id: str,
        opening: pb.SessionOpen,
        dispatcher: Dispatcher,
        limits: SessionLimits,
        totals: SessionTotals,
    ) -> None:
        settings = conversion.settings(opening, credit_timeout=limits.credit_timeout)
        self._limits = limits
        self._name = opening.session_name
        self._session_id = session_id
        self._heartbeat = requests.heartbeat(opening, DEFAULT_HEARTBEAT)
        self._silence = self._next_silence()
        self._planner = FramePlanner(dispatcher, opening, settings.max_frame_age)
        self._runner = FrameRunner(
            dispatcher, self, session_id, frame_deadline=limits.frame_deadline
        )
        self._core: SessionCore[FrameRequest] = SessionCore(settings, self._runner, totals)
        self._responses = conversion.ResponseBuilder(session_id)
        self._failure: LegatoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_sent_at = self._opened_at = time.monotonic()
        self._leave_at = self._opened_at + limits.max_age * random.uniform(0.9, 1.0)
        self._stop_at = self._end_all_at = self._end_at = math.inf
        self._reason: LegatoError | None = None
        self._opened = self._responses.opened(
            pb.SessionOpened(
                session_id=session_id,
                model=self._planner.model.name,
                frame_credits=settings.frame_credits,
                max_in_flight=settings.max_in_flight,
                heartbeat_interval=duration(self._heartbeat),
                contract_revision=CONTRACT_REVISION,
            )
        )

    def _next_silence(self) -> float:
        """Return the silence until a heartbeat, with jitter that keeps sessions apart."""
        return self._heartbeat * random.uniform(0.5, 1.0)

    # ------------------------------------------------------------ the writer

    async def messages(
        self, received: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionResponse]:
        """Yield the session's messages; frames that still run at the end are aborted."""
        self._reader = asyncio.create_task(self._read(received), name="session reader")
        self._reader.add_done_callback(lambda _: self._wake())
        try:
            yield self._opened
            while (response := await self._next()) is not None:
                self._last_sent_at = time.monotonic()
                yield response
        finally:
            self._reader.cancel()
            self._runner.shut_down()
            await asyncio.wait({self._reader})
            await self._runner.wait_stopped()
            # Exceptions refer back to this session: these would keep it until a garbage collection.
            self._reader = self._failure = self._reason = None
            self._log_end()

    async def _next(self) -> pb.SessionResponse | None:
        while True:
            now = time.monotonic()
            self._check_failure()
            self._check_deadlines(now)
            message = self._core.next(now)
            if message is not None:
                return self._responses.response(message, now)
            if self._core.is_finished:
                return None
            if self._core.is_settled and now >= self._end_at:
                if self._reason is not None:
                    raise self._reason
                return None
            if now >= self._last_sent_at + self._silence:
                self._silence = self._next_silence()
                return self._responses.heartbeat()
            await self._pause(now)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._reader is not None and self._reader.done() and not self._reader.cancelled():
            self._reader.result()

    def _check_deadlines(self, now: float) -> None:
        if now >= self._leave_at:
            self.go_away(self._limits.final_grace, None)
        if now >= self._stop_at:
            self._stop_at = math.inf
            self._core.stop_all()
        if now >= self._end_all_at:
            self._end_all_at = math.inf
            self._core.end_all()

    async def _pause(self, now: float) -> None:
        due = min(
            self._last_sent_at + self._silence,
            self._core.next_wake(),
            self._leave_at,
            self._stop_at,
            self._end_all_at,
            self._end_at if self._core.is_settled else math.inf,
        )
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(max(due - now, 0), self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------ the reader

    async def _read(self, received: AsyncIterator[pb.SessionRequest]) -> None:
        """Read at once, so that a newer frame can replace a waiting one."""
        async for request in received:
            self._receive(request)
            self._wake()
        self._core.half_close()

    def _receive(self, request: pb.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "frame":
                now = time.monotonic()
                self._core.receive(self._planner.plan(request.frame, now, time.time()), now)
            case "cancel":
                self._cancel(request.cancel)
            case "grant":
                if request.grant.responses < 1:
                    raise InvalidField("must be at least 1", field="grant.responses")
                self._core.grant(request.grant.responses)
            case "update":
                self._planner.update(request.update.standing_tasks)
            case "open":
                raise SessionOutOfOrder("a session must be opened once", field="open")
            case _:
                raise SessionOutOfOrder("a message needs one of its parts", field="message")

    def _cancel(self, message: pb.CancelFrame) -> None:
        match message.WhichOneof("target"):
            case "sequence":
                self._core.cancel(message.sequence)
            case "task_id":
                self._core.cancel_task(message.task_id)
            case _:
                raise InvalidField("needs a sequence or a task_id", field="cancel.target")

    # ------------------------------------------------------------ the listener

    def image_ready(self, frame: FrameRequest) -> None:
        self._core.image_ready(frame)
        self._wake()

    def output(self, frame: FrameRequest, index: int, output: Output) -> None:
        self._core.output(frame, index, output)
        self._wake()

    def ended(self, frame: FrameRequest, index: int, outcome: Outcome) -> None:
        self._core.ended(frame, index, outcome)
        self._wake()

    # ------------------------------------------------------------ from outside

    @property
    def waits_for_credits(self) -> bool:
        return self._core.waits_for_credits

    def fail(self, error: LegatoError) -> None:
        self._failure = error
        self._wake()

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Announce the end; later calls may shorten `time_left` (seconds)."""
        now = time.monotonic()
        if self._end_at == math.inf:
            self._reason = reason
            if reason is not None:
                self._responses.go_away_reason = failure(reason, self._session_id).status
            self._end_at = now + min(IDLE_LINGER, time_left)
        self._leave_at = math.inf
        self._end_all_at = min(self._end_all_at, now + time_left)
        self._stop_at = min(self._stop_at, now + max(time_left - STOP_GRACE, 0))
        self._core.go_away(time_left)
        self._wake()

    def _log_end(self) -> None:
        dropped = {reason.name.lower(): count for reason, count in self._core.dropped.items()}
        log.info(
            "session_ended",
            session_id=self._session_id,
            session_name=self._name,
            frames=self._core.num_frames,
            must_run=self._core.num_must_run,
            dropped=dropped,
        )


# ---------------------------------------------------------------- frame runner

ImageResult = asyncio.Future[CachedImageRef | LegatoError | None]
"""Result of the task with the image's bytes: the cached image, or a failure of all tasks."""


class FrameRunner:
    """Runner of one session's frames, each for at most `frame_deadline` seconds.

    The session is its listener and owns it, and shuts it down at the end of the call; only running
    frames refer back to the listener.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        listener: SessionDriver,
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
        """Abort the frame. Idempotent."""
        if frame in self._runs:
            self._runs.pop(frame).abort()

    def shut_down(self) -> None:
        """Abort all frames at once. Idempotent.

        A frame's end starts a waiting one, which would otherwise outlive the runner.
        """
        self._shut_down = True
        for frame in list(self._runs):
            self.abort(frame)

    async def wait_stopped(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


@dataclasses.dataclass(eq=False)
class FrameRun:
    """A running frame. `cancel` cancels its asyncio task."""

    _dispatcher: Dispatcher
    _listener: SessionDriver
    _frame: FrameRequest
    _key: RequestKey
    _deadline: float
    _image: CheckedImage = dataclasses.field(default=None, init=False)  # with its bytes
    _streams: dict[int, RequestStream] = dataclasses.field(default_factory=dict, init=False)
    _stopped: set[int] = dataclasses.field(default_factory=set, init=False)
    cancel: Callable[[], object] = dataclasses.field(default=lambda: None, init=False)

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
            image = error.with_traceback(None)  # it would keep this frame, and so the bytes
        self._listener.image_ready(self._frame)
        return image

    async def _start_tasks(
        self, image: CheckedImage | LegatoError, group: asyncio.TaskGroup
    ) -> None:
        """Start the tasks; the first carries the image's bytes, the others refer to it."""
        last = len(self._frame.tasks) - 1
        self._image = None if isinstance(image, LegatoError) else image
        for index, task in enumerate(self._frame.tasks):
            request = task.request
            if isinstance(request, LegatoError):
                self._listener.ended(self._frame, index, request)
            elif isinstance(image, LegatoError):
                self._listener.ended(self._frame, index, _with_session_field(image))
            else:
                cached = ImageResult()
                group.create_task(self._run_task(index, request, image, cached))
                if isinstance(image, NewImage) and index < last:
                    image = await cached or image

    async def _run_task(
        self, index: int, request: Request, image: CheckedImage, cached: ImageResult
    ) -> None:
        outcome: Outcome = None
        try:
            if index not in self._stopped:
                outcome = await self._follow(index, request, image, cached)
        except LegatoError as error:
            outcome = _with_session_field(error)
        if not cached.done():
            cached.set_result(outcome if isinstance(outcome, SHARED_FAILURES) else None)
        self._listener.ended(self._frame, index, outcome)

    async def _follow(
        self, index: int, request: Request, image: CheckedImage, cached: ImageResult
    ) -> Done:
        part = f"{self._key.part}.{index}"
        key = RequestKey(self._key.caller_id, call.current().tenant, part)
        request = msgspec.structs.replace(request, request_id=key)
        with ActiveRequest(self._deadline) as active:
            stream = self._streams[index] = self._dispatcher.submit(
                request, (image,), active, originals=(self._image,), may_wait=index > 0
            )
            async with aclosing(follow(stream)) as outputs:
                async for output in outputs:
                    if isinstance(output, Done):
                        return output
                    if isinstance(output, PrefillStarted) and not cached.done():
                        cached.set_result(cached_image(output))
                    if request.deltas and output is not None:
                        self._listener.output(self._frame, index, output)
        raise InternalError("a stream ended without its result")


def _with_session_field(error: LegatoError) -> LegatoError:
    """Name the session's field; keep no frames alive, which hold the image's bytes."""
    error.with_traceback(None)
    field = error.metadata.get("field", "")
    if field.split(".")[0] == "image":
        error.metadata["field"] = f"frame.{field}"
    elif field == "options.adapter":
        error.metadata["field"] = "open.adapter"
    return error


# ---------------------------------------------------------------- registry


class SessionRegistry:
    """Registry of at most `limit` sessions by key, including sessions being opened.

    Tenants may have sessions of the same id.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.totals = SessionTotals()
        self._sessions: dict[RequestKey, SessionDriver | None] = {}  # None while being opened
        self._going_away: tuple[float, LegatoError | None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    @contextmanager
    def reserve(self, key: RequestKey) -> Iterator[None]:
        """Reserve a place for the length of the block.

        Raises:
            Draining: the server is shutting down.
            SessionsFull: the limit of sessions is reached.
        """
        if self._going_away is not None:
            raise Draining("the server is shutting down")
        if len(self._sessions) >= self._limit:
            raise SessionsFull(
                f"{self._limit} sessions are open, which is the limit", limit=self._limit
            )
        self._sessions[key] = None
        self._empty.clear()
        try:
            yield
        finally:
            del self._sessions[key]
            if not self._sessions:
                self._empty.set()

    def add(self, key: RequestKey, session: SessionDriver) -> None:
        """Register a session; it goes away at once if all have to."""
        self._sessions[key] = session
        if self._going_away is not None:
            session.go_away(*self._going_away)

    @property
    def num_waiting_for_credits(self) -> int:
        return sum(each is not None and each.waits_for_credits for each in self._sessions.values())

    def abort(self, target: RequestKey | None) -> int:
        """End matching sessions, or all, with ABORTED PREEMPTED; return how many were open."""
        opened = [
            session
            for key, session in self._sessions.items()
            if session is not None and (target is None or key.matches(target))
        ]
        for session in opened:
            session.fail(StoppedByOperator("an operator stopped the session"))
        return len(opened)

    def fail_all(self, error: LegatoError) -> None:
        """End them without the results of their frames."""
        for session in self._sessions.values():
            if session is not None:
                session.fail(error)

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Send all sessions away, including those that open later."""
        self._going_away = (time_left, reason)
        for session in self._sessions.values():
            if session is not None:
                session.go_away(time_left, reason)

    async def wait_empty(self) -> None:
        await self._empty.wait()
