"""Sessions of both faces: how they begin, go on and end, well and badly."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
import pytest
from google.rpc import status_pb2
from legato.v1 import geometry_pb2, inference_pb2, server_pb2, session_pb2, task_pb2
from legato_client import (
    AsyncClient,
    AsyncSession,
    Box,
    BoxAxes,
    Cancelled,
    CaptionTask,
    Client,
    DeadlineExceeded,
    DetectTask,
    FrameDelta,
    FrameDropped,
    FrameResult,
    FrameStamp,
    GoAway,
    IncompleteStream,
    InvalidArgument,
    Motion,
    NotFound,
    PointTask,
    Preempted,
    SessionProtocol,
    TextDelta,
    Tracking,
    TrackNow,
    Unavailable,
)
from legato_client._grpc.channel import COMMON_REQUEST_BYTES
from legato_client._session import sessions

from tests.clients.python.face import until
from tests.clients.python.fake_server import CAT, Conversation, Failure, failure, ignore

JPEG = b"picture"
CAPTION = CaptionTask(task_id="a")


def test_terms(connect, server):
    """The plan reaches the server, and its terms come back."""
    with connect(
        [CAPTION],
        policy="preempt",
        max_frame_age=0.25,
        max_in_flight=3,
        stream_deltas=True,
        heartbeat_interval=0.5,
        model="m",
        name="arm",
    ) as session:
        terms = session.terms
    assert (terms.session_id, terms.model, terms.max_in_flight) == ("s-1", "fake", 1)
    assert terms.heartbeat_interval == 0.1
    opening = server.sessions.last.requests[0].open
    assert opening.frame_policy == session_pb2.FRAME_POLICY_PREEMPT
    assert opening.max_frame_age.ToNanoseconds() == 250_000_000
    assert opening.heartbeat_interval.ToNanoseconds() == 500_000_000
    assert (opening.max_in_flight, opening.stream_deltas) == (3, True)
    assert (opening.model, opening.session_name) == ("m", "arm")
    assert [task.task_id for task in opening.standing_tasks] == ["a"]


def test_results(connect, server):
    """Each task of a frame gives a typed result with the frame's stamp, the last one marked."""
    stamp = FrameStamp("camera", 1_500_000_001, 7)
    with connect([CAPTION]) as session:
        assert session.send(JPEG, stamp=stamp, extra_tasks=[CaptionTask(task_id="b")]) == 7
        first, second = next(session), next(session)
    assert (first.stamp, first.sequence, first.task_id) == (stamp, 7, "a")
    assert first.result.caption == "frame 7"
    assert first.result.info.stamp == stamp
    assert (first.result.info.model, first.result.info.finish_reason) == ("fake", "stop")
    assert first.image.width == first.result.info.image.width == 200
    assert [first.last_for_frame, second.last_for_frame] == [False, True]
    assert server.sessions.last.frames[0].image.encoded.data == JPEG


def test_a_frame_that_no_request_carries_does_not_end_the_session(connect, server):
    """It is refused before it is sent, and its credit is there for the next one."""
    limits = server_pb2.Limits(max_request_bytes=COMMON_REQUEST_BYTES)
    info = server_pb2.GetServerInfoResponse(name="legato", limits=limits)
    server.script["GetServerInfo"] += [info] * 2
    with connect([CAPTION]) as session:
        with pytest.raises(InvalidArgument, match="`put_image`"):
            session.send(bytes(COMMON_REQUEST_BYTES + 1))
        assert session.send(JPEG) == 1
        assert next(session).result.caption == "frame 1"


def test_sequences(connect, server):
    """A frame without a sequence gets the next one; one that does not grow is not sent."""
    with connect([CAPTION]) as session:
        assert session.send(JPEG) == 1
        assert session.send(JPEG, stamp=FrameStamp(sequence=9)) == 9
        [next(session) for _ in range(2)]
        with pytest.raises(SessionProtocol, match="not above 9"):
            session.send(JPEG, stamp=FrameStamp(sequence=9))
        assert session.send(JPEG, stamp=FrameStamp("camera")) == 10
        assert next(session).stamp == FrameStamp("camera", sequence=10)
    assert [frame.stamp.sequence for frame in server.sessions.last.frames] == [1, 9, 10]


def test_options_of_a_frame(connect, server):
    """What a frame may carry beside its image arrives."""
    with connect([CAPTION]) as session:
        session.send(JPEG, extra_tasks=[DetectTask("cat")], skip_standing_tasks=True, must_run=True)
        next(session)
    frame = server.sessions.last.frames[0]
    assert frame.extra_tasks[0].detect.object == "cat"
    assert frame.skip_standing_tasks
    assert frame.must_run


def test_dropping_for_want_of_room(connect, server):
    """With `when_full` "drop" a frame beyond the credits is left out at once, and counted."""
    server.sessions.on_frame = ignore
    with connect([CAPTION], when_full="drop") as session:
        assert [session.send(JPEG) for _ in range(4)] == [1, 2, None, None]
        assert (session.stats.sent, session.stats.skipped) == (2, 2)
        until(lambda: len(server.sessions.last.frames) == 2)
        server.sessions.last.drop(1, session_pb2.DROP_REASON_TOO_OLD)
        assert isinstance(next(session), FrameDropped)
        assert session.send(JPEG) == 3


def test_waiting_for_room(connect, server):
    """A frame beyond the credits waits, and goes out when the server took one before it."""
    server.sessions.on_frame = ignore
    with connect([CAPTION]) as session:
        [session.send(JPEG) for _ in range(2)]
        sender = threading.Thread(target=session.send, args=(JPEG,))
        sender.start()
        until(lambda: len(server.sessions.last.frames) == 2)
        assert sender.is_alive()
        server.sessions.last.accept(1)
        sender.join()
        until(lambda: len(server.sessions.last.frames) == 3)


def test_waiting_in_vain(connect, server):
    """A frame that finds no room in time is an error, and the session goes on."""
    server.sessions.on_frame = ignore
    with connect([CAPTION], send_timeout=0.05) as session:
        [session.send(JPEG) for _ in range(2)]
        with pytest.raises(DeadlineExceeded, match="no further frame within"):
            session.send(JPEG)
        until(lambda: len(server.sessions.last.frames) == 2)
        server.sessions.last.answer(server.sessions.last.frames[0])
        assert next(session).sequence == 1


def test_waiting_for_a_credit(connect, server):
    """It ends when the server took a frame, after its time, and with the session."""
    server.sessions.on_frame = ignore
    with connect([CAPTION]) as session:
        assert session.wait_for_credit(0)
        [session.send(JPEG) for _ in range(server.sessions.frame_credits)]
        assert not session.wait_for_credit(0.01)
        until(lambda: len(server.sessions.last.frames) == server.sessions.frame_credits)
        server.sessions.last.accept(1)
        assert session.wait_for_credit(20)
        session.send(JPEG)
        server.sessions.last.fail(failure(grpc.StatusCode.UNAVAILABLE, "DRAINING"))
        with pytest.raises(Unavailable):
            session.wait_for_credit(20)


def test_a_bad_image_costs_no_credit(connect, tmp_path):
    """An image that cannot be read uses up neither a credit nor a sequence."""
    with connect([CAPTION], send_timeout=0.05) as session:
        for _ in range(5):
            with pytest.raises(FileNotFoundError):
                session.send(tmp_path / "none.jpg")
        assert session.send(JPEG) == 1
        assert next(session).sequence == 1


def test_every_frame_has_its_outcome(connect, server):
    """Hundreds of large frames against few credits both ways: no deadlock, none lost."""
    server.sessions.frame_credits = 3
    image = bytes(50_000)

    def some(conversation: Conversation, frame: session_pb2.Frame) -> None:
        if frame.stamp.sequence % 3:
            conversation.answer(frame)
        else:
            conversation.drop(frame.stamp.sequence, session_pb2.DROP_REASON_SUPERSEDED)

    server.sessions.on_frame = some
    outcomes: collections.Counter[type] = collections.Counter()
    with connect([CAPTION], answer_window=4) as session:

        def feed() -> None:
            for _ in range(300):
                session.send(image)
            session.finish()

        feeder = threading.Thread(target=feed)
        feeder.start()
        for answer in session:
            outcomes[type(answer)] += 1
        feeder.join()
        assert outcomes == {FrameResult: 200, FrameDropped: 100}
        assert (session.stats.sent, session.stats.answered) == (300, 200)
        assert session.stats.dropped == 100


def test_grants(connect, server):
    """Answers are granted as the program reads them, and no faster."""
    server.sessions.frame_credits = 20
    with connect([CAPTION], answer_window=4) as session:
        [session.send(JPEG) for _ in range(20)]
        conversation = server.sessions.last
        until(lambda: len(conversation.frames) == 20)
        assert conversation.num_granted == 0
        assert [next(session).sequence for _ in range(20)] == [*range(1, 21)]
        until(lambda: conversation.num_granted == 20)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (session_pb2.DROP_REASON_SUPERSEDED, "superseded"),
        (session_pb2.DROP_REASON_OVERLOADED, "overloaded"),
        (session_pb2.DROP_REASON_CANCELLED, "cancelled"),
        (77, "unspecified"),
    ],
)
def test_drops(connect, server, number, reason):
    """A dropped frame says why; a reason of a newer contract is "unspecified"."""
    server.sessions.on_frame = lambda said, frame: said.drop(frame.stamp.sequence, number, 4)
    with connect([CAPTION]) as session:
        session.send(JPEG)
        assert next(session) == FrameDropped(1, reason, 4)


def test_a_failed_task(connect):
    """A task that fails is an outcome; the session goes on."""
    with connect([CaptionTask(task_id="broken")]) as session:
        session.send(JPEG)
        answer = next(session)
        assert isinstance(answer.outcome, InvalidArgument)
        with pytest.raises(InvalidArgument) as caught:
            _ = answer.result
        assert caught.value.reason == "IMAGE_UNDECODABLE"
        assert session.send(JPEG) == 2


def test_deltas(connect, server):
    """Events of running tasks are typed; those of a newer contract are passed over, and granted."""

    def stream(conversation: Conversation, frame: session_pb2.Frame) -> None:
        conversation.delta(1, "a", text=inference_pb2.TextDelta(text="fr"))
        for _ in range(5):
            conversation.delta(1, "a")
        conversation.delta(1, "a", object=CAT)
        conversation.answer(frame)

    server.sessions.on_frame = stream
    with connect([CAPTION], stream_deltas=True, answer_window=3) as session:
        session.send(JPEG)
        text, cat, end = next(session), next(session), next(session)
    assert text == FrameDelta(1, "a", TextDelta("fr"))
    assert cat.event.label == "cat"
    assert end.last_for_frame


def test_cancel_and_update(connect, server):
    """Cancels and new tasks reach the server, in the order they were said."""
    with connect([CAPTION]) as session:
        session.cancel(sequence=4)
        session.cancel(task_id="a")
        session.update_tasks([CaptionTask(task_id="new")])
        session.send(JPEG)
        assert next(session).task_id == "new"
        for wrong in ({}, {"sequence": 1, "task_id": "a"}):
            with pytest.raises(ValueError, match="either a sequence or a task_id"):
                session.cancel(**wrong)
    said = server.sessions.last.requests
    assert [each.WhichOneof("message") for each in said[:5]] == [
        "open", "cancel", "cancel", "update", "frame",
    ]  # fmt: skip
    assert (said[1].cancel.sequence, said[2].cancel.task_id) == (4, "a")


def test_tasks_without_ids_get_names(connect, server):
    """Their object's, or their skill's, so that results can be told apart."""
    tasks = [DetectTask("cup"), PointTask("hand"), CaptionTask(), DetectTask("x" * 99)]
    with connect(tasks) as session:
        session.update_tasks([DetectTask("cup"), DetectTask("cup", task_id="again")])
        session.send(JPEG)
        assert {next(session).task_id for _ in range(2)} == {"cup", "again"}
    said = server.sessions.last.requests
    names = [task.task_id for task in said[0].open.standing_tasks]
    assert names == ["cup", "hand", "caption", "x" * 64]


def test_two_tasks_of_one_name_are_refused(connect):
    """Before anything is sent."""
    with pytest.raises(ValueError, match="several tasks are called 'cup'"):
        connect([DetectTask("cup"), PointTask("cup")]).__enter__()


# ---------------------------------------------------------------- async session
# What only the asyncio face of a session can get wrong.


async def answered(session: AsyncSession) -> int:
    """The frame of the next result."""
    answer = await anext(session)
    assert isinstance(answer, FrameResult)
    return answer.sequence


async def test_giving_up_waiting_ends_nothing(server):
    """A cancelled `send` or `anext` leaves the stream, its credits and its answers as they were."""
    server.sessions.on_frame = lambda said, frame: None
    async with AsyncClient(server.target) as client, client.session([CaptionTask()]) as session:
        for _ in range(2):
            await session.send(JPEG)
        for waiting in (session.send(JPEG), anext(session)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.02)
        conversation = server.sessions.last
        await asyncio.to_thread(until, lambda: len(conversation.frames) == 2)
        server.sessions.on_frame = type(conversation).answer
        for frame in conversation.frames:
            conversation.answer(frame)
        assert [await answered(session) for _ in range(2)] == [1, 2]
        assert await session.send(JPEG) == 3
        assert await answered(session) == 3
    assert not conversation.violations


async def test_a_slow_image_holds_no_other_up(server, tmp_path):
    """Frames that are read from files while others are sent keep growing sequences."""
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    server.sessions.frame_credits = 20
    async with AsyncClient(server.target) as client, client.session([CaptionTask()]) as session:
        sends = (session.send(path if number % 2 else JPEG) for number in range(20))
        sent = await asyncio.gather(*sends)
        in_order = [await answered(session) for _ in range(20)]
    assert set(sent) == set(in_order)
    assert in_order == [*range(1, 21)]
    assert not server.sessions.last.violations


# ---------------------------------------------------------------- tracks
# Where tracked objects are now, in both faces.

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


def test_capture_times_that_jump_back_are_told(connect, server, caplog):
    """A jump shorter than a track's life, too, is named once, and newer frames count again."""
    times = (10.0, 9.0, 9.1, 9.2, 9.3, 8.0, 8.1, 8.2)
    server.sessions.on_frame = script(*([found("1", 0.125 * k)] for k in range(len(times))))
    with connect([CUPS]) as session:
        for seconds in times[:5]:
            session.send(JPEG, stamp=stamp(seconds))
            next(session)
        (track,) = now(session, 9.3)
        for seconds in times[5:]:
            session.send(JPEG, stamp=stamp(seconds))
            next(session)
    assert (track.axes.center_x, track.age) == (0.5, 0.0)
    records = [each for each in caplog.records if each.name == "legato_client.session"]
    (line,) = [each.getMessage() for each in records]
    assert line.startswith("capture times jumped back by 0.800 s before frame 4")


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


def test_finish(connect, server):
    """After `finish` what is under way is answered, then iterating ends; nothing more is sent."""
    server.sessions.on_frame = ignore

    def answer_all(conversation: Conversation) -> None:
        for frame in conversation.frames:
            conversation.answer(frame)
        conversation.end()

    server.sessions.on_finish = answer_all
    with connect([CAPTION], answer_window=1) as session:
        [session.send(JPEG) for _ in range(2)]
        session.finish()
        assert [answer.sequence for answer in session] == [1, 2]
        assert list(session) == []
        for call in (lambda: session.send(JPEG), session.finish):
            with pytest.raises(Exception, match=r"finished|closed"):
                call()


def test_frames_without_an_outcome(connect, server):
    """A session that ends with OK but owes answers is an error."""
    server.sessions.on_frame = ignore
    with connect([CAPTION]) as session:
        session.send(JPEG)
        session.finish()
        with pytest.raises(IncompleteStream, match="1 frames unanswered"):
            next(session)


def test_a_lost_message(connect, server):
    """A gap in the server's messages is an error."""

    def skip(conversation: Conversation, frame: session_pb2.Frame) -> None:
        conversation.index += 1
        conversation.answer(frame)

    server.sessions.on_frame = skip
    with connect([CAPTION]) as session:
        session.send(JPEG)
        with pytest.raises(IncompleteStream, match="is missing"):
            next(session)
        assert server.sessions.last.ended.wait(30)


def test_a_failure(connect, server):
    """What came before a failure is still read; then the failure is raised to reader and sender."""

    def fail(conversation: Conversation, frame: session_pb2.Frame) -> None:
        conversation.answer(frame)
        conversation.fail(failure(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST"))

    server.sessions.on_frame = fail
    with connect([CAPTION]) as session:
        session.send(JPEG)
        assert next(session).sequence == 1
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                next(session)
            assert caught.value.reason == "ENGINE_LOST"
        with pytest.raises(Unavailable):
            session.send(JPEG)


def test_a_failure_while_sending(connect, server):
    """A session that the server ends while frames are being written fails with its reason."""

    def fail(conversation: Conversation, frame: session_pb2.Frame) -> None:
        conversation.accept(frame.stamp.sequence)
        if frame.stamp.sequence == 5:
            conversation.fail(failure(grpc.StatusCode.ABORTED, "PREEMPTED"))

    def send_for_ever() -> None:
        with connect([CAPTION]) as session:
            while True:
                session.send(bytes(100_000))

    server.sessions.frame_credits = 8
    server.sessions.on_frame = fail
    for _ in range(20):
        with pytest.raises(Preempted):
            send_for_ever()


def test_silence(connect, server):
    """A server that misses its heartbeats is Unavailable, and the call is given up."""
    with connect([CAPTION]) as session:
        server.sessions.silent.set()
        with pytest.raises(Unavailable, match="silent"):
            next(session)
        assert server.sessions.last.ended.wait(30)


def test_heartbeats(connect, server):
    """Heartbeats alone keep a session alive."""
    with connect([CAPTION]) as session:
        until(lambda: server.sessions.last.num_heartbeats > 15)
        session.send(JPEG)
        assert next(session).sequence == 1


def test_go_away(connect, server):
    """A server that leaves says so; what it has is answered, and it is sent no more."""

    def leave(conversation: Conversation, frame: session_pb2.Frame) -> None:
        reason = failure(grpc.StatusCode.UNAVAILABLE, "DRAINING").status()
        away = session_pb2.SessionGoAway(reason=reason)
        away.time_left.FromSeconds(5)
        conversation.say("go_away", away)
        conversation.answer(frame)

    server.sessions.on_frame = leave
    with connect([CAPTION]) as session:
        session.send(JPEG)
        away = next(session)
        assert isinstance(away, GoAway)
        assert away.time_left == 5.0
        assert away.reason is not None
        assert away.reason.reason == "DRAINING"
        with pytest.raises(Unavailable, match="open another"):
            session.send(JPEG)
        assert next(session).sequence == 1


def test_go_away_of_age(connect, server):
    """A session that merely grew old gives no reason."""
    away = session_pb2.SessionGoAway(reason=status_pb2.Status())
    server.sessions.on_frame = lambda said, _: said.say("go_away", away)
    with connect([CAPTION]) as session:
        session.send(JPEG)
        assert next(session) == GoAway(0.0, None)


def test_leaving_cancels(connect, server):
    """Leaving the block, even by an error, gives up what is under way."""
    server.sessions.on_frame = ignore
    with contextlib.suppress(KeyError), connect([CAPTION]) as session:
        session.send(JPEG)
        raise KeyError
    assert server.sessions.last.ended.wait(30)


def test_closing_ends_the_loop(connect, server):
    """A loop over the answers ends quietly when another thread closes the session."""
    server.sessions.on_frame = ignore
    with connect([CAPTION]) as session:
        answers: list[object] = []
        reader = threading.Thread(target=lambda: answers.extend(session))
        reader.start()
        session.close()
        session.close()
        reader.join()
        assert answers == []
        with pytest.raises(Cancelled, match="closed"):
            session.send(JPEG)


def test_opening_fails(connect, server):
    """A session that the server refuses raises the typed error where it is opened."""
    server.sessions.script.append(failure(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"))
    with pytest.raises(NotFound), connect([CAPTION]):
        pass


def test_opening_is_retried(connect, server):
    """A session that meets UNAVAILABLE twice is opened at the third attempt."""
    server.sessions.script += [Failure(grpc.StatusCode.UNAVAILABLE)] * 2
    with connect([CAPTION]) as session:
        session.send(JPEG)
        assert next(session).sequence == 1
    assert server.sessions.num_attempts == 3


def test_opening_takes_too_long(connect, server):
    """A server that does not open the session in time is an error, and is left."""
    server.sessions.silent.set()
    server.sessions.on_open = lambda said: None
    for seconds in (0.2, 2.0, 20.0):  # longer where it had not even heard of it
        with (
            pytest.raises(DeadlineExceeded, match="not opened within"),
            connect([CAPTION], open_timeout=seconds),
        ):
            pass
        if server.sessions.conversations:
            break
    assert server.sessions.last.ended.wait(30)


def test_closing_does_not_wait_for_a_call_that_stays(server, monkeypatch):
    """A call that was cancelled may not end in gRPC; its session ends all the same."""
    released = threading.Event()
    server.sessions.on_open = lambda said: released.wait()
    left: list[Any] = []
    call = importlib.import_module("grpc._channel")._MultiThreadedRendezvous
    cancel = call.cancel
    monkeypatch.setattr(call, "cancel", lambda own: left.append(own))  # noqa: PLW0108 - given the call
    monkeypatch.setattr(sessions, "_END_TIMEOUT_S", 0.2)
    with (
        Client(server.target) as client,
        pytest.raises(DeadlineExceeded, match="not opened within"),
        client.session([CAPTION], open_timeout=2.0),
    ):
        pass
    (stayed,) = left
    cancel(stayed)
    released.set()


@pytest.mark.parametrize(
    "wrong", [{"policy": "newest"}, {"when_full": "block"}, {"answer_window": 0}]
)
def test_bad_plans(connect, server, wrong):
    """A plan that cannot be is refused before anything is sent, with what could be."""
    with pytest.raises(ValueError, match="must be"), connect([CAPTION], **wrong):
        pass
    assert server.sessions.num_attempts == 0
