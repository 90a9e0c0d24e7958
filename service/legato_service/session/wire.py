"""A session's values as the messages of the contract, and its opening as `Terms`."""

from __future__ import annotations

import math

from google.protobuf import duration_pb2
from google.rpc import status_pb2
from legato.v1 import inference_pb2, task_pb2
from legato.v1 import session_pb2 as pb
from legato_engine import core
from legato_engine.errors import InvalidField
from legato_engine.ipc.messages import Done

from legato_service.convert import info, requests
from legato_service.convert.event_stream import EventStream
from legato_service.requests.shared_image import task_result
from legato_service.session.frame import Accepted, Dropped, Event, GoAway, Notice, Result
from legato_service.session.plan import Job
from legato_service.session.terms import Cause, Policy, Terms

MAX_NAME = 64  # characters
MAX_IN_FLIGHT = 8  # frames
QUEUED_FRAMES = 8  # that wait under EVERY_FRAME
DEFAULT_HEARTBEAT = 10.0  # seconds

_POLICIES = {
    pb.FRAME_POLICY_UNSPECIFIED: Policy.LATEST_WINS,
    pb.FRAME_POLICY_LATEST_WINS: Policy.LATEST_WINS,
    pb.FRAME_POLICY_EVERY_FRAME: Policy.EVERY_FRAME,
    pb.FRAME_POLICY_PREEMPT: Policy.PREEMPT,
}
_DROPS = {
    Cause.SUPERSEDED: pb.DROP_REASON_SUPERSEDED,
    Cause.TOO_OLD: pb.DROP_REASON_TOO_OLD,
    Cause.OVERLOADED: pb.DROP_REASON_OVERLOADED,
    Cause.CANCELLED: pb.DROP_REASON_CANCELLED,
    Cause.GOING_AWAY: pb.DROP_REASON_GOING_AWAY,
}


def terms(message: pb.SessionOpen, *, patience: float) -> Terms:
    """What the session is granted; raises `InvalidField` by the opening's fields."""
    if len(message.session_name) > MAX_NAME:
        raise InvalidField(f"at most {MAX_NAME} characters", field="open.session_name")
    if message.frame_policy not in _POLICIES:
        raise InvalidField(
            f"{message.frame_policy} is not a frame policy", field="open.frame_policy"
        )
    max_age = _seconds(message.max_frame_age)
    if max_age < 0:
        raise InvalidField("must not be negative", field="open.max_frame_age")
    policy = _POLICIES[message.frame_policy]
    in_flight = min(message.max_in_flight or 1, MAX_IN_FLIGHT)
    return Terms(
        policy=policy,
        max_in_flight=in_flight,
        # Otherwise one frame waits, and a newer one may be on its way to take its place.
        frame_credits=QUEUED_FRAMES if policy is Policy.EVERY_FRAME else in_flight + 1,
        max_frame_age=max_age or math.inf,
        response_credits=message.response_credits or None,
        patience=patience,
    )


def heartbeat(message: pb.SessionOpen) -> float:
    """Seconds of silence before a heartbeat; raises `InvalidField`."""
    if not message.HasField("heartbeat_interval"):
        return DEFAULT_HEARTBEAT
    seconds = _seconds(message.heartbeat_interval)
    if seconds <= 0:
        raise InvalidField("must be positive", field="open.heartbeat_interval")
    return max(seconds, requests.MIN_HEARTBEAT)


class Script:
    """Writes what the core says as responses, `index` 0, 1, 2, ..."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._next = 0
        self._events: dict[int, dict[int, EventStream]] = {}  # by sequence and task
        self.farewell = status_pb2.Status()

    def opened(self, opened: pb.SessionOpened) -> pb.SessionResponse:
        """The first response."""
        return self._numbered(pb.SessionResponse(opened=opened))

    def heartbeat(self) -> pb.SessionResponse:
        """Nothing to say."""
        return self._numbered(pb.SessionResponse(heartbeat=inference_pb2.Heartbeat()))

    def of(self, message: Notice | Event[Job] | Result[Job]) -> pb.SessionResponse:
        """A message of the core's."""
        match message:
            case Accepted():
                response = pb.SessionResponse(
                    accepted=pb.FrameAccepted(
                        sequence=message.sequence, frame_credits=message.frame_credits
                    )
                )
            case Dropped():
                response = pb.SessionResponse(dropped=_dropped(message))
                self._events.pop(message.sequence, None)
            case GoAway():
                away = pb.SessionGoAway(
                    time_left=info.duration(message.time_left), reason=self.farewell
                )
                response = pb.SessionResponse(go_away=away)
            case Event():
                response = pb.SessionResponse(delta=self._delta(message))
            case Result():
                response = pb.SessionResponse(result=self._result(message))
                if message.last:
                    self._events.pop(message.frame.sequence, None)
        return self._numbered(response)

    def _numbered(self, response: pb.SessionResponse) -> pb.SessionResponse:
        response.index = self._next
        self._next += 1
        return response

    def _delta(self, message: Event[Job]) -> pb.FrameDelta:
        job, index = message.frame, message.index
        of_frame = self._events.setdefault(job.sequence, {})
        if index not in of_frame:
            request_id = f"{self._session_id}#{job.sequence}.{index}"
            of_frame[index] = EventStream(request_id, job.task_ids[index], None)
        (event,) = of_frame[index].of(message.report)
        return pb.FrameDelta(sequence=job.sequence, task_id=job.task_ids[index], event=event)

    def _result(self, message: Result[Job]) -> pb.FrameResult:
        job, index, outcome = message.frame, message.index, message.outcome
        task_id = job.task_ids[index]
        if outcome is None:
            result = _nothing(task_id, job.tasks[index].asked)
        else:
            result = task_result(task_id, outcome, f"{self._session_id}#{job.sequence}.{index}")
        if (
            message.stopped is Cause.SUPERSEDED
            and result.finish_reason == task_pb2.FINISH_REASON_CANCELLED
        ):
            result.finish_reason = task_pb2.FINISH_REASON_SUPERSEDED
        image = outcome.image if isinstance(outcome, Done) else None
        return pb.FrameResult(
            stamp=job.stamp,
            result=result,
            image=info.image(image),
            last_for_frame=message.last,
        )


def _dropped(message: Dropped) -> pb.FrameDropped:
    return pb.FrameDropped(
        sequence=message.sequence,
        reason=_DROPS[message.cause],
        frame_credits=message.frame_credits,
        dropped_total=message.dropped_total,
    )


def _nothing(task_id: str, asked: core.Request | Exception) -> task_pb2.TaskResult:
    """The partial result of a task that was stopped before it began: its skill's, empty."""
    result = task_pb2.TaskResult(
        task_id=task_id, finish_reason=task_pb2.FINISH_REASON_CANCELLED, usage=task_pb2.Usage()
    )
    match asked.task if isinstance(asked, core.Request) else None:
        case core.CaptionTask():
            result.caption.SetInParent()
        case core.DetectTask():
            result.detect.SetInParent()
        case core.PointTask():
            result.point.SetInParent()
        case core.SegmentTask():
            result.segment.SetInParent()
        case _:
            result.query.SetInParent()
    return result


def _seconds(message: duration_pb2.Duration) -> float:
    return message.ToNanoseconds() / 1e9
