"""A session from its opening to its end: results, stopped frames, tracks and ages."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, timestamp_pb2
from legato.v1 import inference_pb2, media_pb2, session_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.client.request_stream import RequestStream
from legato_engine.errors import ImageUndecodable, PoisonedRequest, QueueFull
from legato_engine.types import (
    CachedImageRef,
    DetectOutput,
    DetectSpec,
    EncodedImage,
    ImageBox,
    ObjectEvent,
    RequestKey,
)
from legato_service.arguments import parse
from legato_service.session.session import FrameRun, FrameRunner, SessionDriver

from tests.service.fakes import FakeEngine, answer, begin, done, hold, refuse, started
from tests.service.harness import image_message, no_collections, refusal, remaining, running, until
from tests.service.session.client import (
    DETECT,
    QUERY,
    SessionClient,
    answer_all,
    begun,
    opening,
    reason_of,
    seconds,
    session,
    settled,
)

# ---------------------------------------------------------------- opening

EVERY = session_pb2.FRAME_POLICY_EVERY_FRAME


async def test_a_session_is_opened_on_its_terms():
    """`opened` names id, model and granted limits; health and the list have the service."""
    async with (
        running() as server,
        session(server, max_in_flight=100, frame_policy=EVERY) as client,
    ):
        opened = client.opened
        assert opened.session_id
        assert opened.model == "fake-1"
        assert opened.max_in_flight == 8
        assert opened.frame_credits >= 1
        assert opened.heartbeat_interval.ToMilliseconds() == 10_000
        assert opened.contract_revision >= 1
        assert len(server.server.sessions) == 1
        await client.done()
        await client.end()
        await settled(server)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"frame": {"stamp": {"sequence": 1}}}, "open"),
        ({"grant": {"responses": 1}}, "open"),
        ({}, "open"),
    ],
)
async def test_nothing_comes_before_the_opening(message, field):
    """Another first message is SESSION_PROTOCOL, by its field."""
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.send(**message)
        failed = await client.failure()
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == "SESSION_PROTOCOL"
    assert failed.details["BadRequest"].field_violations[0].field == field


async def test_a_session_that_is_not_opened_ends():
    """A client that sends nothing, or leaves at once, gets an error about `open`."""
    async with running(session_open_timeout=0.05) as server:
        failed = await SessionClient(server.sessions.Session()).failure()
        assert failed.reason == "SESSION_PROTOCOL"
        client = SessionClient(server.sessions.Session())
        await client.done()
        assert (await client.failure()).reason == "SESSION_PROTOCOL"
        await settled(server)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other"}, "MODEL_NOT_FOUND"),
        ({"adapter": "cups@12"}, "ADAPTER_NOT_FOUND"),
        ({"session_name": "x" * 65}, "INVALID_FIELD"),
        ({"frame_policy": 9}, "INVALID_FIELD"),
        ({"max_frame_age": seconds(-1)}, "INVALID_FIELD"),
        ({"heartbeat_interval": seconds(0)}, "INVALID_FIELD"),
        ({"standing_tasks": [DETECT, DETECT]}, "INVALID_FIELD"),
        ({"standing_tasks": [task_pb2.Task()]}, "INVALID_FIELD"),
        ({"standing_tasks": [QUERY] * 33}, "INVALID_FIELD"),
    ],
)
async def test_an_invalid_opening_has_its_own_status(fields, reason):
    """Errors that concern every frame end the call at once."""
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.send(open=opening(**fields))
        assert (await client.failure()).reason == reason
        await settled(server)


async def test_no_more_sessions_than_allowed():
    """Beyond the limit a session is refused with QUEUE_FULL, until one has ended."""
    async with running(max_sessions=1) as server:
        async with session(server):
            failed = await SessionClient(server.sessions.Session()).failure()
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failed.reason == "QUEUE_FULL"
            assert failed.details["ErrorInfo"].metadata["limit"] == "1"
        await settled(server)
        async with session(server):
            pass


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"open": {}}, "SESSION_PROTOCOL"),
        ({}, "SESSION_PROTOCOL"),
        ({"frame": {}}, "SESSION_PROTOCOL"),
        ({"frame": {"stamp": {"sequence": 1}}}, "SESSION_PROTOCOL"),
        ({"cancel": {}}, "INVALID_FIELD"),
        ({"grant": {}}, "INVALID_FIELD"),
        ({"update": {"standing_tasks": [{}]}}, "INVALID_FIELD"),
    ],
)
async def test_a_protocol_error_ends_the_session(message, reason):
    """A message out of order, or without content, ends the session, and nothing is left."""
    async with running(FakeEngine(hold)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.send(**message)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.reason == reason
        await settled(server)


# ---------------------------------------------------------------- frames
# The results of frames, also of failed ones.

ERROR = "error"


async def test_a_frame_gets_all_its_results():
    """Stamps are echoed verbatim; the bytes reach the engine once; the last result is marked."""
    stamp = media_pb2.FrameStamp(
        frame_id="cam/left", sequence=7, capture_time=timestamp_pb2.Timestamp(seconds=5, nanos=1)
    )
    async with (
        running() as server,
        session(server, standing_tasks=[DETECT, QUERY], stream_deltas=True) as client,
    ):
        await client.frame(7, stamp=stamp)
        await client.done()
        await client.end()
        cups, count = sorted(client.results[7], key=lambda each: each.task_id != "cups")
        assert len(cups.detect.objects) == 2
        assert count.query.answer == "Three red cups."
        assert cups.finish_reason == count.finish_reason == task_pb2.FINISH_REASON_STOP
        assert client.accepted == [7]
        assert [type(each.image) for each in server.engine.requests] == [
            EncodedImage,
            CachedImageRef,
        ]
        text = client.deltas[7, "count"].of("text")
        assert "".join(each.text.text for each in text) == "Three red cups."
        assert len(client.deltas[7, "cups"].of("object")) == 2
        await settled(server)


async def test_without_deltas_only_results_come():
    """A session without deltas gets one result for each task, and the engine sends no deltas."""
    async with running() as server, session(server) as client:
        await client.frame(1)
        await client.outcome(1)
        assert client.kinds() == ["opened", "accepted", "result"]
        assert not server.engine.requests[0].deltas


async def test_frames_bring_tasks():
    """Extra tasks follow the standing ones, or replace them."""
    async with running() as server, session(server) as client:
        await client.frame(1, extra_tasks=[QUERY])
        await client.outcome(1)
        await client.frame(2, extra_tasks=[QUERY], skip_standing_tasks=True)
        await client.outcome(2)
        assert {each.task_id for each in client.results[1]} == {"cups", "count"}
        assert [each.task_id for each in client.results[2]] == ["count"]


async def test_tasks_are_replaced_from_the_next_frame_on():
    """UpdateTasks leaves the frames before it alone."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await client.send(update=session_pb2.UpdateTasks(standing_tasks=[QUERY]))
        await client.frame(2)
        await begun(server)
        server.engine.script = answer
        answer_all(server.engine)
        await client.done()
        await client.end()
        assert [each.task_id for each in client.results[1]] == ["cups"]
        assert [each.task_id for each in client.results[2]] == ["count"]


BAD = media_pb2.Image(encoded=media_pb2.EncodedImage(data=b"no picture"))
NAMELESS = task_pb2.Task(task_id="x")


@pytest.mark.parametrize(
    ("frame", "results"),
    [
        ({"image": BAD}, {"cups": "IMAGE_UNDECODABLE"}),
        ({"image": None}, {"cups": "INVALID_FIELD"}),
        ({"extra_tasks": [NAMELESS]}, {"cups": None, "x": "INVALID_FIELD"}),
        ({"extra_tasks": [DETECT]}, {"": "INVALID_FIELD"}),
        ({"extra_tasks": [task_pb2.Task()] * 40}, {"": "INVALID_FIELD"}),
        ({"skip_standing_tasks": True}, {"": "INVALID_FIELD"}),
    ],
)
async def test_a_bad_frame_fails_by_itself(frame, results):
    """A bad image or task is a result with `error`; the session goes on."""
    async with running() as server, session(server) as client:
        await client.frame(1, **frame)
        await client.outcome(1)
        got = {
            each.task_id: reason_of(each) if each.WhichOneof("result") == ERROR else None
            for each in client.results[1]
        }
        assert got == results
        await client.frame(2)
        await client.done()
        await client.end()
        assert client.results[2][0].detect.objects
        await settled(server)


async def test_failed_frames_do_not_wait_for_a_garbage_collection():
    """Their image's bytes go at once: a camera sends many of them between two collections."""
    refusing = FakeEngine(refuse(PoisonedRequest("it ends the engine")))
    async with running(refusing) as server, session(server) as client:
        with no_collections():
            for sequence, image in enumerate((image_message(), media_pb2.Image()), start=1):
                await client.frame(sequence, image=image)
                await client.outcome(sequence)
            await until(lambda: not remaining(FrameRun))


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ImageUndecodable("cut"), "IMAGE_UNDECODABLE"), (QueueFull(), "QUEUE_FULL")],
)
async def test_a_bad_image_fails_all_tasks_of_its_frame(error, reason):
    """The engine does not get the bad image again for the later tasks."""
    async with (
        running(FakeEngine(refuse(error))) as server,
        session(server, standing_tasks=[DETECT, QUERY]) as client,
    ):
        await client.frame(1)
        await client.outcome(1)
        assert [reason_of(each) for each in client.results[1]] == [reason, reason]
        assert len(server.engine.requests) == 1


async def test_a_bug_fails_the_frame_only():
    """An unexpected exception is INTERNAL for its frame, without its text."""

    def explode(engine, stream):
        raise ValueError("secret")

    async with running(FakeEngine(explode)) as server, session(server) as client:
        await client.frame(1)
        await client.outcome(1)
        (result,) = client.results[1]
        assert reason_of(result) == "INTERNAL"
        assert "secret" not in str(result)
        server.engine.streams.clear()
        server.engine.script = answer
        await client.frame(2)
        await client.done()
        await client.end()


async def test_a_lost_engine_fails_the_frames_and_not_the_session():
    """ENGINE_LOST is in the results; a new engine serves later frames."""
    async with running(FakeEngine(begin)) as server, session(server, max_in_flight=2) as client:
        await client.frame(1)
        await client.frame(2)
        await begun(server, 2)
        server.engine.become(EngineState.LOST)
        await client.frame(3)
        await client.outcome(1, 2, 3)
        for sequence in (1, 2, 3):
            assert reason_of(client.results[sequence][0]) == "ENGINE_LOST"
        server.engine.script = answer
        server.engine.become(EngineState.READY)
        await client.frame(4)
        await client.done()
        await client.end()
        assert client.results[4][0].detect.objects
        await settled(server)


# ---------------------------------------------------------------- stopping
# Frames that are cancelled, superseded or too old.

PREEMPT = session_pb2.FRAME_POLICY_PREEMPT
SUPERSEDED = task_pb2.FINISH_REASON_SUPERSEDED
CANCELLED = task_pb2.FINISH_REASON_CANCELLED


async def test_preempted_work_has_partial_results():
    """The older frame's results are partial and SUPERSEDED, also of tasks not started."""
    async with (
        running(FakeEngine(hold)) as server,
        session(server, frame_policy=PREEMPT, standing_tasks=[DETECT, QUERY]) as client,
    ):
        await client.frame(1)
        await begun(server)
        server.engine.script = answer
        await client.frame(2)
        await client.done()
        await client.end()
        assert [each.finish_reason for each in client.results[1]] == [SUPERSEDED, SUPERSEDED]
        assert {each.WhichOneof("result") for each in client.results[1]} == {"detect", "query"}
        assert len(client.results[2]) == 2
        await settled(server)


async def test_a_running_task_is_cancelled_alone():
    """Its result is partial and CANCELLED, its sibling's is whole; the waiting frame is dropped."""
    tasks = [DETECT, QUERY]
    async with (
        running(FakeEngine(begin)) as server,
        session(server, standing_tasks=tasks) as client,
    ):
        await client.frame(1)
        await begun(server, 2)
        await client.frame(2)
        await client.send(cancel=session_pb2.CancelFrame(task_id="count"))
        await client.send(cancel=session_pb2.CancelFrame(sequence=2))
        await client.send(cancel=session_pb2.CancelFrame(sequence=2))
        await client.wait_for(lambda: client.results[1] and 2 in client.dropped)
        assert client.dropped[2].reason == session_pb2.DROP_REASON_CANCELLED
        assert client.results[1][0].finish_reason == CANCELLED
        answer_all(server.engine)
        await client.done()
        await client.end()
        assert client.results[1][1].detect.objects
        await settled(server)


async def test_a_frame_that_runs_is_cancelled():
    """All its results are CANCELLED."""
    async with running(FakeEngine(hold)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.send(cancel=session_pb2.CancelFrame(sequence=1))
        await client.done()
        await client.end()
        assert [each.finish_reason for each in client.results[1]] == [CANCELLED]


async def test_a_frame_that_gets_too_old_is_dropped():
    """Age counts from the capture time; its running tasks are aborted."""
    async with (
        running(FakeEngine(hold)) as server,
        session(server, max_frame_age=seconds(0.2)) as client,
    ):
        await client.frame(1)
        await client.outcome(1)
        assert client.dropped[1].reason == session_pb2.DROP_REASON_TOO_OLD
        await until(lambda: not server.engine.streams)
        stamp = media_pb2.FrameStamp(sequence=2)
        stamp.capture_time.GetCurrentTime()
        old = media_pb2.FrameStamp(sequence=3)
        old.capture_time.FromNanoseconds(stamp.capture_time.ToNanoseconds() - 10**9)
        await client.frame(2, stamp=stamp)
        await client.frame(3, stamp=old)
        await client.outcome(3)
        assert client.dropped[3].reason == session_pb2.DROP_REASON_TOO_OLD
        await until(lambda: not server.engine.streams and len(server.engine.blobs) == 0)


async def test_a_clock_that_is_set_back_stops_no_camera():
    """A few frames are too old by the new clock, those after them are answered."""
    async with running(FakeEngine()) as server, session(server, max_frame_age=seconds(5)) as client:
        begin = timestamp_pb2.Timestamp()
        begin.GetCurrentTime()
        for sequence in range(1, 6):
            stamp = media_pb2.FrameStamp(sequence=sequence)
            back = 0 if sequence == 1 else 60 * 10**9 - sequence * 10**7
            stamp.capture_time.FromNanoseconds(begin.ToNanoseconds() - back)
            await client.frame(sequence, stamp=stamp)
            await client.outcome(sequence)
        too_old = session_pb2.DROP_REASON_TOO_OLD
        assert {n: each.reason for n, each in client.dropped.items()} == {2: too_old, 3: too_old}
        assert client.whole == {1, 4, 5}


# ---------------------------------------------------------------- end
# The ends of a session, after which nothing is left of it.


async def test_half_close_finishes_what_came_before():
    """Running and waiting frames get results, then the session ends with OK."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.frame(2)
        await client.done()
        server.engine.script = answer
        answer_all(server.engine)
        await client.end()
        assert client.whole == {1, 2}
        await settled(server)


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_client_that_leaves_frees_everything(way):
    """A cancelled call or closed channel aborts running frames; waiting ones never start."""
    async with running(FakeEngine(begin)) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            there = type(server)(server.server, server.engine, server.port, channel)
            async with session(there, max_in_flight=2, standing_tasks=[DETECT, QUERY]) as client:
                for sequence in range(1, 6):
                    await client.frame(sequence)
                await begun(server, 4)
                if way == "cancel":
                    client.call.cancel()
                else:
                    await channel.close()
                await settled(server)
        assert len(server.engine.requests) == 4
        assert Counter(server.engine.aborted) == Counter(
            request.request_id for request in server.engine.requests
        )


async def test_sessions_cancelled_at_any_step_leave_nothing():
    """A session that is cancelled during its first steps leaves nothing."""
    async with running(FakeEngine(hold)) as server:
        for steps in range(0, 60, 3):
            call = server.sessions.Session()
            await call.write(session_pb2.SessionRequest(open=opening()))
            stamp = media_pb2.FrameStamp(sequence=1)
            frame = session_pb2.Frame(stamp=stamp, image=image_message())
            await call.write(session_pb2.SessionRequest(frame=frame))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
        await settled(server)


@pytest.mark.parametrize("way", ["half-close", "cancel", "breach", "operator"])
async def test_a_session_leaves_nothing_to_collect(way):
    """A session is in no reference cycle: all that it held is freed at its end."""
    async with running(FakeEngine(hold)) as server:
        with no_collections():
            others = remaining(
                SessionDriver, FrameRunner
            )  # other tests' that something still holds
            async with session(server) as client:
                await client.frame(1)
                await begun(server)
                if way == "half-close":
                    answer_all(server.engine)
                    await client.done()
                    await client.end()
                elif way == "breach":
                    await client.send(open={})
                    await client.failure()
                elif way == "operator":
                    server.server.sessions.abort(None)
                    await client.failure()
            await settled(server)
            await until(lambda: remaining(SessionDriver, FrameRunner).keys() <= others.keys())


async def test_a_drain_says_go_away():
    """Sessions get the reason, later frames are dropped, running ones end, then UNAVAILABLE."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        draining = asyncio.create_task(server.server.drain(60))
        await client.wait_for(lambda: "go_away" in client.kinds())
        (away,) = [each.go_away for each in client.messages if each.HasField("go_away")]
        assert 0 < away.time_left.ToMilliseconds() <= 60_000
        assert away.reason.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await client.frame(2)
        await client.outcome(2)
        assert client.dropped[2].reason == session_pb2.DROP_REASON_GOING_AWAY
        assert client.dropped[2].frame_credits == 0
        answer_all(server.engine)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "DRAINING"
        client.balance()
        assert await draining
        refused = await refusal(server.inference.Query(inference_pb2.QueryRequest(question="?")))
        assert refused.reason == "DRAINING"


async def test_a_drain_ends_with_its_grace():
    """Work that does not end in time is stopped with partial results, and the drain succeeds."""
    async with running(FakeEngine(hold)) as server, session(server, max_in_flight=1) as client:
        await client.frame(1)
        await begun(server)
        await client.frame(2)
        await until(lambda: len(client.sent) == 2)
        assert await server.server.drain(1.2)
        assert (await client.failure()).reason == "DRAINING"
        client.balance()
        assert client.results[1][0].finish_reason == CANCELLED
        await settled(server)


async def test_a_session_has_a_greatest_age():
    """It gets go_away with an OK reason, and ends with OK."""
    async with running(max_session_age=0.1) as server, session(server) as client:
        await client.end()
        assert client.kinds()[-1] == "go_away"
        assert client.messages[-1].go_away.reason.code == 0
        await settled(server)


async def test_an_operator_ends_a_session():
    """ABORTED PREEMPTED ends the named session, or all; an unknown id is reported."""
    async with running(FakeEngine(begin)) as server:
        async with session(server) as one, session(server) as two, session(server) as three:
            await one.frame(1)
            await begun(server)
            registry = server.server.sessions
            assert registry.abort(RequestKey(one.opened.session_id))
            failed = await one.failure()
            assert failed.code is grpc.StatusCode.ABORTED
            assert failed.reason == "PREEMPTED"
            await until(lambda: not server.engine.streams)
            assert not registry.abort(RequestKey(one.opened.session_id))
            assert registry.abort(None) == 2
            for each in (two, three):
                assert (await each.failure()).reason == "PREEMPTED"
        await settled(server)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--max-sessions", "0"], "at least 1"), (["--max-session-age", "0"], "above 0")],
)
def test_invalid_settings_are_refused(arguments, message, capsys):
    """The exit code is 2, and the message gives the reason."""
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


FPS = 30


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
