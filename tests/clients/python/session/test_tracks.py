"""Where tracked objects are now, in both faces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from legato.v1 import geometry_pb2, session_pb2, task_pb2
from legato_client import (
    Box,
    BoxAxes,
    CaptionTask,
    DetectTask,
    FrameStamp,
    Motion,
    Tracking,
    TrackNow,
)

from tests.clients.python.fake_sessions import Conversation

JPEG = b"picture"
CUPS = DetectTask("cup", tracking=Tracking(3.0))
SECOND = 1_000_000_000
Script: TypeAlias = Callable[[Conversation, session_pb2.Frame], None]


def axes(center_x: float = 0.0, width: float = 0.0) -> geometry_pb2.BoxAxes:
    return geometry_pb2.BoxAxes(
        center_x=center_x, center_y=0.5 * center_x, width=width, height=width
    )


def found(track_id: str, center_x: float, velocity: float = 0.25) -> geometry_pb2.DetectedObject:
    """A cup that moves to the right and down, with binary fractions, so that sums are exact."""
    motion = geometry_pb2.Motion(
        position=axes(center_x, 0.5),
        velocity=axes(velocity),
        acceleration=axes(0.5),
        position_deviation=axes(3),
        velocity_deviation=axes(2),
    )
    return geometry_pb2.DetectedObject(label="cup", track_id=track_id, motion=motion)


def script(*frames: Sequence[geometry_pb2.DetectedObject]) -> Script:
    """Answers the frames with these objects, for the task that was asked for last."""
    left = list(frames)

    def on_frame(said: Conversation, frame: session_pb2.Frame) -> None:
        said.accept(frame.stamp.sequence)
        detect = task_pb2.DetectResult(objects=left.pop(0))
        result = task_pb2.TaskResult(task_id=said.tasks[0].task_id, detect=detect)
        said.result(frame, result, last=True)

    return on_frame


def stamp(seconds: float, sequence: int = 0) -> FrameStamp:
    return FrameStamp("camera", round(seconds * SECOND), sequence)


def test_tracks_are_extrapolated_to_the_moment(connect, server):
    """By velocity and acceleration, with a deviation that grows; results have ids and motion."""
    server.sessions.on_frame = script([found("1", 0.25)], [found("1", 0.5), found("2", 0.0)])
    with connect([CUPS]) as session:
        assert now(session, 10) == ()
        session.send(JPEG, stamp=stamp(10))
        session.send(JPEG, stamp=stamp(11))
        first = next(session).result.objects[0]
        second = next(session)
        one, other = now(session, 13)
    assert (first.track_id, first.motion.velocity.center_x) == ("1", 0.25)
    assert isinstance(first.motion, Motion)
    assert one.axes == BoxAxes(0.5 + 0.5 + 1.0, 0.25 + 0.25 + 0.5, 0.5, 0.5)
    assert one.box == Box(1.75, 0.75, 2.25, 1.25)
    assert one.deviation == BoxAxes(5.0, 2.5, 0.0, 0.0)
    assert (one.age, one.sequence, one.task_id, one.label) == (2.0, 2, "cup", "cup")
    assert (one.track_id, other.track_id) == ("1", "2")
    assert one.last == second.result.objects[0]
    (task,) = server.sessions.last.requests[0].open.standing_tasks
    assert task.detect.tracking.max_unseen.ToNanoseconds() == 3 * SECOND


def now(session: Any, seconds: float) -> tuple[TrackNow, ...]:
    """The tracks at a moment of the stamps' clock."""
    plain = getattr(session, "_session", session)  # it is no coroutine in the asyncio face
    return plain.now(round(seconds * SECOND))


def test_an_object_that_was_not_found_waits_as_long_as_was_asked(connect, server):
    """It goes 3 s after it was last found, by the stamps and by the moment that is asked for."""
    server.sessions.on_frame = script([found("1", 0.5)], [], [])
    with connect([CUPS]) as session:
        for seconds in (10, 12.9):
            session.send(JPEG, stamp=stamp(seconds))
            next(session)
        assert [each.age for each in now(session, 13)] == [3.0]
        assert now(session, 13.1) == ()
        session.send(JPEG, stamp=stamp(13.1))
        next(session)
        assert now(session, 13) == ()


def test_a_clock_that_is_set_back_leaves_no_tracks_of_the_future(connect, server):
    """The tracks of before go, those of after stay."""
    server.sessions.on_frame = script([found("1", 0.5)], [found("2", 0.5)])
    with connect([CUPS]) as session:
        for seconds in (1000, 10):
            session.send(JPEG, stamp=stamp(seconds))
            next(session)
        assert [each.track_id for each in now(session, 10)] == ["2"]
        assert now(session, 1000) == ()


def test_a_late_result_does_not_take_a_track_back(connect, server):
    """The newest capture counts, not the newest arrival."""
    server.sessions.on_frame = script([found("1", 0.5)], [found("1", 0.25)])
    with connect([CUPS]) as session:
        session.send(JPEG, stamp=stamp(11))
        session.send(JPEG, stamp=stamp(10))
        for _ in range(2):
            next(session)
        assert [each.axes.center_x for each in now(session, 11)] == [0.5]


def test_a_frame_without_a_time_counts_from_its_sending(connect, server):
    """On the wall's clock."""
    server.sessions.on_frame = script([found("1", 0.5, velocity=0.0)])
    with connect([CUPS]) as session:
        before = time.time_ns()
        session.send(JPEG)
        next(session)
        (track,) = getattr(session, "_session", session).now()
        after = time.time_ns()
    assert 0 <= track.age <= (after - before) / SECOND


def test_tasks_that_are_replaced_take_their_tracks_along(connect, server):
    """A task that goes on keeps them."""
    server.sessions.on_frame = script([found("1", 0.5)])
    with connect([CUPS]) as session:
        session.send(JPEG, stamp=stamp(10))
        next(session)
        session.update_tasks([DetectTask("cup", tracking=Tracking())])
        assert len(now(session, 11)) == 1
        assert now(session, 12.5) == ()  # its time is the default now
        session.update_tasks([DetectTask("hand", task_id="cup", tracking=Tracking())])
        assert now(session, 11) == ()


def test_what_is_not_tracked_is_not_there(connect, server):
    """Other tasks, objects that the server does not follow, and failures are no tracks."""
    plain = geometry_pb2.DetectedObject(label="cup")
    server.sessions.on_frame = script([plain])
    with connect([CUPS]) as session:
        session.send(JPEG, stamp=stamp(10))
        assert next(session).result.objects[0].motion is None
        assert now(session, 10) == ()
    with connect([CaptionTask(task_id="cup")]) as session:
        assert now(session, 10) == ()


def test_the_age_of_a_result_is_told(connect, server):
    """None where the server does not say."""

    def on_frame(said: Conversation, frame: session_pb2.Frame) -> None:
        result = session_pb2.FrameResult(stamp=frame.stamp, last_for_frame=True)
        result.result.caption.caption = "a"
        if frame.stamp.sequence == 1:
            result.age.FromMilliseconds(250)
        said.accept(frame.stamp.sequence)
        said.say("result", result)

    server.sessions.on_frame = on_frame
    with connect([CaptionTask()]) as session:
        ages = []
        for _ in range(2):
            session.send(JPEG)
            ages.append(next(session).age)
    assert ages == [0.25, None]


def test_a_negative_time_is_refused_here():
    """Before anything is sent."""
    from legato_client._proto.requests import task_message

    with pytest.raises(ValueError, match="must be 0 to"):
        task_message(DetectTask("cup", tracking=Tracking(-1)))
