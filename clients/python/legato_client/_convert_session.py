"""What a session says, as Python values."""

from __future__ import annotations

from legato.v1 import session_pb2

from legato_client import _convert, _errors, _session_types, _types


def terms(message: session_pb2.SessionOpened) -> _session_types.SessionTerms:
    """What the server granted."""
    return _session_types.SessionTerms(
        session_id=message.session_id,
        model=message.model,
        max_in_flight=message.max_in_flight,
        heartbeat_interval=_convert.seconds(message.heartbeat_interval),
    )


def result(message: session_pb2.FrameResult, model: str) -> _session_types.FrameResult:
    """One task's end on one frame."""
    stamp = _convert.stamp(message.stamp)
    image = _convert.image_info(message.image) if message.HasField("image") else None
    shared = _types.ResponseInfo("", model, "unspecified", image=image, stamp=stamp)
    return _session_types.FrameResult(
        stamp=stamp,
        task_id=message.result.task_id,
        outcome=_convert.outcome(message.result, shared),
        image=image,
        last_for_frame=message.last_for_frame,
    )


def dropped(message: session_pb2.FrameDropped) -> _session_types.FrameDropped:
    """A frame that gets no results."""
    reason = _convert.enum_word(session_pb2.DropReason.DESCRIPTOR, message.reason)
    return _session_types.FrameDropped(message.sequence, reason, message.dropped_total)


def delta(message: session_pb2.FrameDelta) -> _session_types.FrameDelta | None:
    """An event of a running task; None for a kind this client does not know."""
    event = _convert.event(message.event)
    if event is None:
        return None
    return _session_types.FrameDelta(message.sequence, message.task_id, event)


def go_away(message: session_pb2.SessionGoAway) -> _session_types.GoAway:
    """The server's notice."""
    reason = _errors.from_status(message.reason) if message.reason.code else None
    return _session_types.GoAway(_convert.seconds(message.time_left), reason)
