"""The camera's side of a session, against a server without a model."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from legato.v1 import session_pb2
from legato_client import AsyncClient, LegatoError

from examples.robot import report
from examples.robot.drive import CAMERA, Clip, play
from examples.robot.recording import Recording
from examples.robot.scene import compose
from tests.examples.robot.fake_session import FakeSession, serving

FPS = 200.0  # a third of an image's travel between two frames does not matter here
SCENE = compose(("bus", "dog"), 0)
NOUNS = ("bus", "dog")
FILES = [b"image %d" % k for k in range(12)]


def as_it_is(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
    """No twist."""
    return response


async def run(session: FakeSession, fps: float = FPS) -> Recording:
    """The clip, played to that server."""
    async with serving(session) as address, AsyncClient(address) as client:
        return await play(client, Clip(FILES, fps), NOUNS, max_frame_age=0.25)


async def test_the_terms_are_those_that_were_asked_for() -> None:
    """Latest wins, one Detect for each noun, and the greatest age, to the nanosecond."""
    session = FakeSession(SCENE, FPS, as_it_is)
    await run(session)
    opened: Any = session.opened
    assert opened.frame_policy == session_pb2.FRAME_POLICY_LATEST_WINS
    assert opened.max_frame_age.ToNanoseconds() == 250_000_000
    assert [(task.task_id, task.detect.object) for task in opened.standing_tasks] == [
        ("bus", "bus"),
        ("dog", "dog"),
    ]
    assert all(task.detect.HasField("tracking") for task in opened.standing_tasks)


async def test_every_image_is_sent_once_with_its_own_stamp() -> None:
    """Frames go in order, their capture times exactly a frame apart, on the wall's clock."""
    session = FakeSession(SCENE, FPS, as_it_is)
    before = time.time_ns()
    await run(session)
    assert [frame.image.encoded.data for frame in session.frames] == FILES
    assert [frame.stamp.sequence for frame in session.frames] == list(range(1, 13))
    assert {frame.stamp.frame_id for frame in session.frames} == {CAMERA}
    taken = [frame.stamp.capture_time.ToNanoseconds() for frame in session.frames]
    assert [at - taken[0] for at in taken] == [round(k / FPS * 1e9) for k in range(12)]
    assert before <= taken[0] <= time.time_ns()


async def test_the_session_is_asked_where_things_are_at_every_frame() -> None:
    """Each look has the tracks of the answers that had arrived, extrapolated to its moment."""
    recording = await run(FakeSession(SCENE, FPS, as_it_is))
    assert len(recording.looks) == 12
    assert recording.looks[0].tracks == ()
    for look in recording.looks:
        for track in look.tracks:
            assert track.age == pytest.approx(look.time - (track.sequence - 1) / FPS, abs=1e-6)
    last = {answer.noun: answer for answer in recording.answers}
    assert [track.track_id for track in last["dog"].tracks] == ["dog-1"]
    assert all(answer.told_age == 0.007 for answer in recording.answers)


async def test_no_frame_leaves_before_it_is_taken() -> None:
    """The clock is the camera's: a frame is sent at its time or later, never sooner."""
    recording = await run(FakeSession(SCENE, FPS, as_it_is))
    assert [frame.captured for frame in recording.sent] == [k / FPS for k in range(12)]
    assert all(frame.sent >= frame.captured for frame in recording.sent)


async def test_both_books_agree_and_true_boxes_score_one() -> None:
    """Four frames answered, eight dropped, none lost; boxes at the truth of their capture fit."""
    recording = await run(FakeSession(SCENE, FPS, as_it_is))
    figures = report.summarise(SCENE, recording)
    assert figures["faults"] == []
    assert figures["frames"] == {
        "taken": 12,
        "left_out": 0,
        "sent": 12,
        "answered": 4,
        "dropped": 8,
        "dropped_by_reason": {"superseded": 8},
        "dropped_as_the_server_counts": 8,
    }
    assert figures["iou_at_capture"]["mean"] == pytest.approx(1, abs=1e-5)
    assert figures["iou_on_arrival"]["mean"] <= figures["iou_at_capture"]["mean"]
    assert figures["tracks_by_noun"] == {"bus": 1, "dog": 1}
    assert figures["boxes_too_many"] == 0


@pytest.mark.parametrize("kind", ["dropped", "result"])
async def test_a_message_that_is_lost_shows(kind: str) -> None:
    """A server that forgets one frame's end cannot look whole."""
    seen = []

    def without_the_first(response: session_pb2.SessionResponse) -> Any:
        if response.WhichOneof("message") == kind:
            seen.append(response)
        return None if seen and response is seen[0] else response

    recording = await run(FakeSession(SCENE, FPS, without_the_first))
    assert recording.failure.startswith("IncompleteStream")
    assert recording.failure in recording.faults()
    assert any(fault.startswith("frame ") for fault in recording.faults())


async def test_a_frame_without_a_credit_is_left_out_and_counted() -> None:
    """With one credit that never comes back, one frame goes and the others are left out here."""

    def keeps_the_credit(response: session_pb2.SessionResponse) -> Any:
        """Nothing is said of the first frame, so it stays under way."""
        return response if response.WhichOneof("message") == "opened" else None

    session = FakeSession(SCENE, FPS, keeps_the_credit)
    session.credits = 1
    recording = await run(session)
    assert [frame.sequence for frame in recording.sent] == [1]
    assert recording.left_out == list(range(2, 13))
    assert "frame 1: answers [], 0 drops" in recording.faults()


async def test_a_failed_task_is_an_answer_without_boxes() -> None:
    """An error counts as the frame's end, is not scored, and is counted as failed."""

    def failed(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
        if response.WhichOneof("message") == "result":
            response.result.result.error.code = 5
            response.result.result.error.message = "no such thing"
        return response

    recording = await run(FakeSession(SCENE, FPS, failed))
    figures = report.summarise(SCENE, recording)
    assert figures["faults"] == []
    assert figures["answers"] == {"total": 8, "failed": 8}
    assert figures["frames"]["answered"] == 4
    assert all("no such thing" in answer.error for answer in recording.answers)


async def test_a_session_that_does_not_open_is_broken() -> None:
    """Anything but `opened` as the first message ends the run at once."""

    def no_opened(response: session_pb2.SessionResponse) -> session_pb2.SessionResponse:
        if response.WhichOneof("message") == "opened":
            response.heartbeat.SetInParent()
        return response

    with pytest.raises(LegatoError):
        await run(FakeSession(SCENE, FPS, no_opened))


async def test_a_session_that_fails_says_so() -> None:
    """The server's status is among the faults, and what was recorded until then is kept."""
    session = FakeSession(SCENE, FPS, as_it_is)
    session.end, session.end_after = grpc.StatusCode.UNAVAILABLE, 4
    recording = await run(session)
    assert recording.failure.startswith("Unavailable")
    assert recording.failure in recording.faults()


async def test_a_session_that_ends_early_does_not_look_whole() -> None:
    """OK before the clip is over is a fault, though every frame sent had its end."""
    session = FakeSession(SCENE, FPS, as_it_is)
    session.end_after = 1
    recording = await run(session, fps=6)
    assert any("before the clip was" in fault for fault in recording.faults())
