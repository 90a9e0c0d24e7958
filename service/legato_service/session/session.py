"""One session: reads all that comes at once, has frames run, and writes from one place."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator

import structlog
from legato.v1 import session_pb2 as pb
from legato_engine.errors import InvalidField, LegatoError, SessionProtocol

from legato_service.convert import info
from legato_service.errors import failure
from legato_service.requests.dispatcher import Dispatcher
from legato_service.session import wire
from legato_service.session.core import SessionCore
from legato_service.session.frame import Outcome, Report
from legato_service.session.frame_runner import FrameRunner
from legato_service.session.plan import Job, Planner

log = structlog.get_logger("legato.session")

LAST_WORDS = 1.0
"""Seconds, within the time left, that work which was stopped gets to say what it has."""
LINGER = 0.25
"""Seconds between `go_away` and the end of an idle session: frames on their way get an answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What holds for every session of a server, in seconds."""

    open_timeout: float = 10.0
    patience: float = 30.0  # for credits
    frame_deadline: float = 60.0
    max_age: float = 3600.0  # some up to a tenth earlier: who came together must not leave together
    farewell: float = 30.0  # how long running work may go on at the greatest age


class Session:
    """One session, from its opening on. Raises at its making what is wrong with the opening.

    `messages` is iterated once; what it raises ends the call. All times are `time.monotonic`.
    """

    def __init__(
        self,
        session_id: str,
        opening: pb.SessionOpen,
        dispatcher: Dispatcher,
        limits: SessionLimits,
        contract_revision: int,
    ) -> None:
        terms = wire.terms(opening, patience=limits.patience)
        self._limits = limits
        self._name = opening.session_name
        self._session_id = session_id
        self._heartbeat = wire.heartbeat(opening)
        self._silence = self._a_silence()
        self._planner = Planner(dispatcher, opening, terms.max_frame_age)
        self._crew = FrameRunner(dispatcher, self, session_id, patience=limits.frame_deadline)
        self._core: SessionCore[Job] = SessionCore(terms, self._crew)
        self._script = wire.Script(session_id)
        self._failure: LegatoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._spoke_at = self._opened_at = time.monotonic()
        self._leave_at = self._opened_at + limits.max_age * random.uniform(0.9, 1.0)
        self._wind_up_at = self._cut_at = self._end_at = math.inf
        self._reason: LegatoError | None = None
        self._opened = self._script.opened(
            pb.SessionOpened(
                session_id=session_id,
                model=self._planner.model.name,
                frame_credits=terms.frame_credits,
                max_in_flight=terms.max_in_flight,
                heartbeat_interval=info.duration(self._heartbeat),
                contract_revision=contract_revision,
            )
        )

    def _a_silence(self) -> float:
        """Seconds to the next heartbeat: sessions that opened together must not speak together."""
        return self._heartbeat * random.uniform(0.5, 1.0)

    # ------------------------------------------------------------ the writer

    async def messages(
        self, requests: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionResponse]:
        """All responses, to the end; frames that still run when the iteration ends are aborted."""
        self._reader = asyncio.create_task(self._read(requests), name="session reader")
        self._reader.add_done_callback(lambda _: self._wake())
        try:
            yield self._opened
            while (response := await self._next()) is not None:
                self._spoke_at = time.monotonic()
                yield response
        finally:
            self._reader.cancel()
            self._crew.dismiss()
            await asyncio.wait({self._reader})
            await self._crew.gone()
            # What was raised leads back to this session: kept, it would wait for a collection.
            self._reader = self._failure = self._reason = None
            self._log_end()

    async def _next(self) -> pb.SessionResponse | None:
        """The next response, once there is one; None at the end."""
        while True:
            now = time.monotonic()
            self._check_failure()
            self._mind_the_end(now)
            message = self._core.next(now)
            if message is not None:
                return self._script.of(message)
            if self._core.is_finished:
                return None
            if self._core.is_settled and now >= self._end_at:
                if self._reason is not None:
                    raise self._reason
                return None
            if now >= self._spoke_at + self._silence:
                self._silence = self._a_silence()
                return self._script.heartbeat()
            await self._pause(now)

    def _check_failure(self) -> None:
        """Raise what ends the session: an operator's word, or what the reader met."""
        if self._failure is not None:
            raise self._failure
        if self._reader is not None and self._reader.done() and not self._reader.cancelled():
            self._reader.result()

    def _mind_the_end(self, now: float) -> None:
        if now >= self._leave_at:
            self.go_away(self._limits.farewell, None)
        if now >= self._wind_up_at:
            self._wind_up_at = math.inf
            self._core.wind_up()
        if now >= self._cut_at:
            self._cut_at = math.inf
            self._core.cut()

    async def _pause(self, now: float) -> None:
        """Until something happens, or something is due."""
        due = min(
            self._spoke_at + self._silence,
            self._core.next_wake(),
            self._leave_at,
            self._wind_up_at,
            self._cut_at,
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

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Take in whatever comes, as fast as it comes: only so can a newer frame replace one."""
        async for request in requests:
            self._take(request)
            self._wake()
        self._core.half_close()

    def _take(self, request: pb.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "frame":
                now = time.monotonic()
                self._core.receive(self._planner.job(request.frame, now, time.time()), now)
            case "cancel":
                self._cancel(request.cancel)
            case "grant":
                if request.grant.responses < 1:
                    raise InvalidField("must be at least 1", field="grant.responses")
                self._core.grant(request.grant.responses)
            case "update":
                self._planner.update(request.update.standing_tasks)
            case "open":
                raise SessionProtocol("a session is opened once", field="open")
            case _:
                raise SessionProtocol("a message says what it is", field="message")

    def _cancel(self, message: pb.CancelFrame) -> None:
        match message.WhichOneof("target"):
            case "sequence":
                self._core.cancel(message.sequence)
            case "task_id":
                self._core.cancel_task(message.task_id)
            case _:
                raise InvalidField("says what to stop", field="cancel.target")

    # ------------------------------------------------------------ the listener

    def taken(self, job: Job) -> None:
        """A frame's picture was taken in."""
        self._core.taken(job)
        self._wake()

    def report(self, job: Job, index: int, report: Report) -> None:
        """A task said something."""
        self._core.report(job, index, report)
        self._wake()

    def ended(self, job: Job, index: int, outcome: Outcome) -> None:
        """A task ended."""
        self._core.ended(job, index, outcome)
        self._wake()

    # ------------------------------------------------------------ from outside

    def fail(self, error: LegatoError) -> None:
        """End now, with this error."""
        self._failure = error
        self._wake()

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Announce the end: what runs may go on for `time_left` seconds. Later calls shorten it."""
        now = time.monotonic()
        if self._end_at == math.inf:
            self._reason = reason
            if reason is not None:
                self._script.farewell = failure(reason, self._session_id).status
            self._end_at = now + min(LINGER, time_left)
        self._leave_at = math.inf
        self._cut_at = min(self._cut_at, now + time_left)
        self._wind_up_at = min(self._wind_up_at, now + max(time_left - LAST_WORDS, 0))
        self._core.go_away(time_left)
        self._wake()

    def _log_end(self) -> None:
        dropped = {cause.name.lower(): count for cause, count in self._core.dropped.items()}
        log.info(
            "session",
            session_id=self._session_id,
            session_name=self._name,
            frames=self._core.num_frames,
            must_run=self._core.num_must_run,
            dropped=dropped,
        )
