"""Session responses as Python values."""

from __future__ import annotations

from legato.v1 import session_pb2

from legato_client import _errors
from legato_client._convert import pieces, responses
from legato_client._values import results, session


def terms(message: session_pb2.SessionOpened) -> session.SessionTerms:
    return session.SessionTerms(
        session_id=message.session_id,
        model=message.model,
        max_in_flight=message.max_in_flight,
        heartbeat_interval=pieces.seconds(message.heartbeat_interval),
    )


def result(message: session_pb2.FrameResult, model: str) -> session.FrameResult:
    stamp = pieces.stamp(message.stamp)
    image = pieces.image_info(message.image) if message.HasField("image") else None
    shared = results.ResponseInfo("", model, "unspecified", image=image, stamp=stamp)
    return session.FrameResult(
        stamp=stamp,
        task_id=message.result.task_id,
        outcome=responses.outcome(message.result, shared),
        image=image,
        last_for_frame=message.last_for_frame,
        age=pieces.seconds(message.age) if message.HasField("age") else None,
    )


def dropped(message: session_pb2.FrameDropped) -> session.FrameDropped:
    reason = pieces.enum_word(session_pb2.DropReason.DESCRIPTOR, message.reason)
    return session.FrameDropped(message.sequence, reason, message.dropped_total)


def delta(message: session_pb2.FrameDelta) -> session.FrameDelta | None:
    """None for a kind this client does not know."""
    event = responses.event(message.event)
    if event is None:
        return None
    return session.FrameDelta(message.sequence, message.task_id, event)


def go_away(message: session_pb2.SessionGoAway) -> session.GoAway:
    reason = _errors.from_status(message.reason) if message.reason.code else None
    return session.GoAway(pieces.seconds(message.time_left), reason)
