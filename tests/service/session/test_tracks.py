"""Tracks of a session's objects, and the age of its results."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, timestamp_pb2
from legato.v1 import inference_pb2, media_pb2, session_pb2, task_pb2
from legato_engine.client.request_stream import RequestStream
from legato_engine.types import DetectOutput, DetectSpec, ImageBox, ObjectEvent

from tests.service.fakes import FakeEngine, done, hold, started
from tests.service.harness import image_message, refusal, running
from tests.service.session.client import DETECT, SessionClient, begun, reason_of, session, settled

FPS = 30
EVERY = session_pb2.FRAME_POLICY_EVERY_FRAME


def following(object_: str = "cup", task_id: str = "cups", **tracking: Any) -> task_pb2.Task:
    """A tracked task."""
    detect = task_pb2.DetectTask(object=object_, tracking=task_pb2.Tracking(**tracking))
    return task_pb2.Task(task_id=task_id, detect=detect)


def find(engine: FakeEngine, stream: RequestStream, *centers: float) -> None:
    """End a request with a box around each of these places."""
    task = stream.request.task
    assert isinstance(task, DetectSpec)
    boxes = [ImageBox(x_min=x - 0.05, y_min=0.4, x_max=x + 0.05, y_max=0.6) for x in centers]
    result = DetectOutput(objects=tuple(ObjectEvent(box=box, label=task.object) for box in boxes))
    engine.feed(stream, started(stream.request), done(stream.request, result))


async def frame(client: SessionClient, sequence: int, at: float | None = None) -> None:
    """Send a frame that was captured at `at` seconds, by default at the rate of a camera."""
    captured = timestamp_pb2.Timestamp()
    captured.FromNanoseconds(round((sequence / FPS if at is None else at) * 1e9))
    await client.frame(
        sequence, stamp=media_pb2.FrameStamp(sequence=sequence, capture_time=captured)
    )


def stream_of(engine: FakeEngine, sequence: int) -> RequestStream:
    """The request of a frame."""
    (stream,) = (s for key, s in engine.streams.items() if key.part.split(".")[0] == str(sequence))
    return stream


def ids(client: SessionClient, sequence: int, index: int = 0) -> list[str]:
    """The tracks of a frame's objects."""
    return [each.track_id for each in client.results[sequence][index].detect.objects]


async def test_objects_keep_their_tracks_whatever_ends_first():
    """Frames in flight that end out of order have the tracks of their places."""
    async with (
        running(FakeEngine(hold)) as server,
        session(
            server, standing_tasks=[following()], frame_policy=EVERY, max_in_flight=3
        ) as client,
    ):
        for sequence in (1, 2, 3):
            await frame(client, sequence)
        await begun(server, 3)
        for sequence in (2, 3, 1):
            step = 0.01 * sequence
            find(server.engine, stream_of(server.engine, sequence), 0.7 - step, 0.2 + step)
            await client.outcome(sequence)
        assert ids(client, 1) == ids(client, 2) == ids(client, 3) == ["1", "2"]
        motion = client.results[1][0].detect.objects[1].motion
        assert motion.position.center_x == pytest.approx(0.21, abs=0.002)
        assert motion.position.width == pytest.approx(0.1, abs=0.002)
        assert motion.velocity.center_x == pytest.approx(0.3, abs=0.1)
        assert 0 < motion.position_deviation.center_x < 0.01
        assert motion.velocity_deviation.center_x > 0
        await client.done()
        await client.end()
        await settled(server)


async def test_dropped_frames_only_leave_a_gap():
    """A track goes on over frames that were superseded, for the time that it was given."""
    async with (
        running(FakeEngine(hold)) as server,
        session(
            server, standing_tasks=[following(max_unseen=duration_pb2.Duration(seconds=3))]
        ) as client,
    ):
        for sequence, at in ((1, 0.0), (2, 2.9), (3, 6.0)):
            await frame(client, 10 * sequence, at)
            await begun(server, sequence)
            await frame(client, 10 * sequence + 1, at + 0.01)
            await frame(client, 10 * sequence + 2, at + 0.02)
            await client.outcome(10 * sequence + 1)
            await client.send(cancel=session_pb2.CancelFrame(sequence=10 * sequence + 2))
            await client.outcome(10 * sequence + 2)
            find(server.engine, stream_of(server.engine, 10 * sequence), 0.5)
            await client.outcome(10 * sequence)
        assert (ids(client, 10), ids(client, 20), ids(client, 30)) == (["1"], ["1"], ["2"])


async def test_tasks_have_tracks_of_their_own():
    """No name is used twice in a session, and what is not asked for is not told."""
    tasks = [following(), following("hand", "hands"), DETECT]
    tasks[2] = task_pb2.Task(task_id="plain", detect=task_pb2.DetectTask(object="cup"))

    def script(engine: FakeEngine, stream: RequestStream) -> None:
        find(engine, stream, 0.3, 0.6)

    async with (
        running(FakeEngine(script)) as server,
        session(server, standing_tasks=tasks) as client,
    ):
        await frame(client, 1)
        await client.outcome(1)
        results = {each.task_id: each.detect.objects for each in client.results[1]}
        tracked = [each.track_id for name in ("cups", "hands") for each in results[name]]
        assert sorted(tracked) == ["1", "2", "3", "4"]
        assert [each.track_id for each in results["plain"]] == ["", ""]
        assert not any(each.HasField("motion") for each in results["plain"])


async def test_an_update_keeps_the_tracks_of_tasks_that_go_on():
    """The same id and object go on; another object starts anew, as does a task that was gone."""

    def script(engine: FakeEngine, stream: RequestStream) -> None:
        find(engine, stream, 0.5)

    async with (
        running(FakeEngine(script)) as server,
        session(server, standing_tasks=[following()]) as client,
    ):
        updates = (
            [following(max_unseen=duration_pb2.Duration(seconds=1))],
            [following("hand")],
            [following()],
        )
        await frame(client, 1)
        await client.outcome(1)
        for sequence, tasks in enumerate(updates, 2):
            await client.send(update=session_pb2.UpdateTasks(standing_tasks=tasks))
            await frame(client, sequence)
            await client.outcome(sequence)
        assert [ids(client, sequence) for sequence in (1, 2, 3, 4)] == [["1"], ["1"], ["2"], ["3"]]


async def test_a_frame_of_a_task_that_went_has_no_tracks():
    """A result that comes after the update is told without."""
    async with (
        running(FakeEngine(hold)) as server,
        session(server, standing_tasks=[following()]) as client,
    ):
        await frame(client, 1)
        await begun(server)
        await client.send(update=session_pb2.UpdateTasks(standing_tasks=[DETECT]))
        await client.send(cancel=session_pb2.CancelFrame(sequence=7))
        await frame(client, 2)
        await client.wait_for(lambda: 1 in client.accepted)
        find(server.engine, stream_of(server.engine, 1), 0.5)
        await client.outcome(1)
        assert ids(client, 1) in ([""], ["1"])  # the update may still be on its way


async def test_frames_without_a_time_count_from_their_arrival():
    """Objects are followed there too."""

    def script(engine: FakeEngine, stream: RequestStream) -> None:
        find(engine, stream, 0.5)

    async with (
        running(FakeEngine(script)) as server,
        session(server, standing_tasks=[following()]) as client,
    ):
        for sequence in (1, 2):
            await client.frame(sequence)
            await client.outcome(sequence)
        assert ids(client, 1) == ids(client, 2) == ["1"]


async def test_another_session_starts_anew():
    """Nothing of a session's tracks is left when it has ended."""

    def script(engine: FakeEngine, stream: RequestStream) -> None:
        find(engine, stream, 0.5)

    async with running(FakeEngine(script)) as server:
        for _ in range(2):
            async with session(server, standing_tasks=[following()]) as client:
                await frame(client, 1)
                await client.outcome(1)
                assert ids(client, 1) == ["1"]
            await settled(server)


@pytest.mark.parametrize(("seconds", "nanos"), [(-1, 0), (60, 1)])
async def test_the_time_of_a_track_is_limited(seconds, nanos):
    """From 0 to 60 s; the error names the field."""
    unseen = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    task = following(max_unseen=unseen)
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.send(open=session_pb2.SessionOpen(standing_tasks=[task]))
        failed = await client.failure()
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = failed.details["BadRequest"].field_violations
    assert violation.field == "open.standing_tasks[0].detect.tracking.max_unseen"


async def test_tracking_is_for_standing_tasks():
    """An extra task of a frame fails alone; RunTasks and Generate are refused, by field."""
    async with running() as server, session(server) as client:
        await client.frame(1, extra_tasks=[following(task_id="extra")])
        await client.outcome(1)
        results = {each.task_id: each for each in client.results[1]}
        assert reason_of(results["extra"]) == "INVALID_FIELD"
        assert results["cups"].HasField("detect")
        run = inference_pb2.RunTasksRequest(image=image_message(), tasks=[following()])
        failed = await refusal(server.inference.RunTasks(run))
        (violation,) = failed.details["BadRequest"].field_violations
        assert violation.field == "tasks[0].detect.tracking"
        stream = server.inference.Generate(
            inference_pb2.GenerateRequest(image=image_message(), task=following())
        )
        failed = await refusal(stream.read(), None)
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_results_tell_the_age_of_their_frame():
    """From capture to sending, by the client's clock where the stamp has its time."""
    async with running() as server, session(server) as client:
        await frame(client, 1, time.time() - 5)
        await client.frame(2)
        await client.outcome(1, 2)
        ages = {
            each.result.stamp.sequence: each.result.age.ToNanoseconds() / 1e9
            for each in client.messages
            if each.HasField("result")
        }
    assert 5 <= ages[1] < 65
    assert 0 < ages[2] < 60
