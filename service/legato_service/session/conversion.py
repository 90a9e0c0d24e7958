"""Conversion of a session's opening and messages; malformed fields raise `InvalidField`."""

from __future__ import annotations

import math

from google.rpc import status_pb2
from legato.v1 import inference_pb2, task_pb2
from legato.v1 import session_pb2 as pb
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import Done
from legato_engine.types import SKILL_OF_TASK, Request, RequestKey

from legato_service.convert import skills
from legato_service.convert.responses import duration, image_info
from legato_service.convert.stream import EventStream
from legato_service.requests.dispatcher import task_result
from legato_service.session.core import (
    Accepted,
    Dropped,
    DropReason,
    FrameOutcome,
    FrameOutput,
    FramePolicy,
    GoAwayNotice,
    Notice,
    SessionSettings,
)
from legato_service.session.frames import FrameRequest, fill_tracks

MAX_IN_FLIGHT = 8  # frames
QUEUED_FRAMES = 8  # under EVERY_FRAME

_POLICIES = {pb.FramePolicy.Value(f"FRAME_POLICY_{each.name}"): each for each in FramePolicy}
_POLICIES[pb.FRAME_POLICY_UNSPECIFIED] = FramePolicy.LATEST_WINS
_DROP_REASONS = {each: pb.DropReason.Value(f"DROP_REASON_{each.name}") for each in DropReason}


def settings(message: pb.SessionOpen, *, credit_timeout: float) -> SessionSettings:
    if message.frame_policy not in _POLICIES:
        raise InvalidField(
            f"{message.frame_policy} is not a frame policy", field="open.frame_policy"
        )
    max_age = skills.seconds(message.max_frame_age)
    policy = _POLICIES[message.frame_policy]
    in_flight = min(message.max_in_flight or 1, MAX_IN_FLIGHT)
    return SessionSettings(
        policy=policy,
        max_in_flight=in_flight,
        # The other policies let one frame wait; a newer one may be on its way to replace it.
        frame_credits=QUEUED_FRAMES if policy is FramePolicy.EVERY_FRAME else in_flight + 1,
        max_frame_age=max_age or math.inf,
        response_credits=message.response_credits or None,
        credit_timeout=credit_timeout,
    )


class ResponseBuilder:
    """Converter of the core's messages to responses with `index` 0, 1, 2, ...

    `go_away_reason` is the status of the next `go_away` message.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._next_index = 0
        self._events: dict[int, dict[int, EventStream]] = {}  # by sequence and task
        self.go_away_reason = status_pb2.Status()

    def opened(self, opened: pb.SessionOpened) -> pb.SessionResponse:
        return self._numbered(pb.SessionResponse(opened=opened))

    def heartbeat(self) -> pb.SessionResponse:
        return self._numbered(pb.SessionResponse(heartbeat=inference_pb2.Heartbeat()))

    def response(
        self, message: Notice | FrameOutput[FrameRequest] | FrameOutcome[FrameRequest], now: float
    ) -> pb.SessionResponse:
        """Build a response; `now` is on the clock of `Frame.captured_at`."""
        match message:
            case Accepted():
                response = pb.SessionResponse(
                    accepted=pb.FrameAccepted(
                        sequence=message.sequence, frame_credits=message.frame_credits
                    )
                )
            case Dropped():
                response = pb.SessionResponse(
                    dropped=pb.FrameDropped(
                        sequence=message.sequence,
                        reason=_DROP_REASONS[message.reason],
                        frame_credits=message.frame_credits,
                        dropped_total=message.dropped_total,
                    )
                )
                self._events.pop(message.sequence, None)
            case GoAwayNotice():
                away = pb.SessionGoAway(
                    time_left=duration(message.time_left), reason=self.go_away_reason
                )
                response = pb.SessionResponse(go_away=away)
            case FrameOutput():
                response = pb.SessionResponse(delta=self._delta(message))
            case FrameOutcome():
                response = pb.SessionResponse(result=self._result(message, now))
                if message.last:
                    self._events.pop(message.frame.sequence, None)
        return self._numbered(response)

    def _numbered(self, response: pb.SessionResponse) -> pb.SessionResponse:
        response.index = self._next_index
        self._next_index += 1
        return response

    def _request_id(self, frame: FrameRequest, index: int) -> str:
        """Return the engine's name for the request of a frame's task, without the tenant."""
        return RequestKey(self._session_id, part=f"{frame.sequence}.{index}").name

    def _delta(self, message: FrameOutput[FrameRequest]) -> pb.FrameDelta:
        frame, index = message.frame, message.index
        of_frame = self._events.setdefault(frame.sequence, {})
        if index not in of_frame:
            request_id = self._request_id(frame, index)
            of_frame[index] = EventStream(request_id, frame.task_ids[index], None)
        (event,) = of_frame[index].convert(message.output)
        return pb.FrameDelta(sequence=frame.sequence, task_id=frame.task_ids[index], event=event)

    def _result(self, message: FrameOutcome[FrameRequest], now: float) -> pb.FrameResult:
        frame, index, outcome = message.frame, message.index, message.outcome
        task_id = frame.task_ids[index]
        if outcome is None:
            result = _empty_result(task_id, frame.tasks[index].request)
        else:
            result = task_result(task_id, outcome, self._request_id(frame, index))
        if (
            message.stopped is DropReason.SUPERSEDED
            and result.finish_reason == task_pb2.FINISH_REASON_CANCELLED
        ):
            result.finish_reason = task_pb2.FINISH_REASON_SUPERSEDED
        tracker = frame.tasks[index].tracker
        if tracker is not None and result.HasField("detect"):
            fill_tracks(result.detect.objects, tracker, frame.sequence, frame.captured_time)
        image = outcome.image if isinstance(outcome, Done) else None
        return pb.FrameResult(
            stamp=frame.stamp,
            result=result,
            image=None if image is None else image_info(image),
            last_for_frame=message.last,
            age=duration(max(now - frame.captured_at, 0.0)),
        )


def _empty_result(task_id: str, request: Request | Exception) -> task_pb2.TaskResult:
    result = task_pb2.TaskResult(
        task_id=task_id, finish_reason=task_pb2.FINISH_REASON_CANCELLED, usage=task_pb2.Usage()
    )
    skill = "query"
    if isinstance(request, Request):
        skill = SKILL_OF_TASK[type(request.task)]
    getattr(result, skill).SetInParent()
    return result
