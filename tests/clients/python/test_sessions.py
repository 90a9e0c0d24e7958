"""Sessions of both faces, against a server that keeps the contract to the letter."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading

import grpc
import pytest
from google.rpc import status_pb2
from legato.v1 import inference_pb2, session_pb2
from legato_client import (
    Cancelled,
    CaptionTask,
    DeadlineExceeded,
    DetectTask,
    FrameDelta,
    FrameDropped,
    FrameResult,
    FrameStamp,
    GoAway,
    IncompleteStream,
    InvalidArgument,
    NotFound,
    SessionProtocol,
    TextDelta,
    Unavailable,
)

from tests.clients.python.face import session_of
from tests.clients.python.failures import Failure, failure
from tests.clients.python.fake_server import CAT
from tests.clients.python.fake_sessions import Conversation
from tests.clients.python.until import until

JPEG = b"picture"
CAPTION = CaptionTask(task_id="a")


@pytest.fixture(params=["sync", "async"])
def connect(request, server):
    """Opens a session of either face; whatever it did, it did by the contract."""
    yield functools.partial(session_of, request.param, server.target)
    assert not [each.violations for each in server.sessions.conversations if each.violations]


def ignore(conversation: Conversation, frame: session_pb2.Frame) -> None:
    """What a server does that has no time for a frame."""


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
    """What a frame may carry beside its picture arrives."""
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


def test_a_bad_picture_costs_no_credit(connect, tmp_path):
    """A picture that cannot be read uses up neither a credit nor a sequence."""
    with connect([CAPTION], send_timeout=0.05) as session:
        for _ in range(5):
            with pytest.raises(FileNotFoundError):
                session.send(tmp_path / "none.jpg")
        assert session.send(JPEG) == 1
        assert next(session).sequence == 1


def test_every_frame_has_its_outcome(connect, server):
    """Hundreds of large frames against few credits both ways: no deadlock, none lost."""
    server.sessions.frame_credits = 3
    picture = bytes(50_000)

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
                session.send(picture)
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
    with (
        pytest.raises(DeadlineExceeded, match="not opened within"),
        connect([CAPTION], open_timeout=0.2),
    ):
        pass
    assert server.sessions.last.ended.wait(30)


@pytest.mark.parametrize(
    "wrong", [{"policy": "newest"}, {"when_full": "block"}, {"answer_window": 0}]
)
def test_bad_plans(connect, server, wrong):
    """A plan that cannot be is refused before anything is sent, with what could be."""
    with pytest.raises(ValueError, match="must be"), connect([CAPTION], **wrong):
        pass
    assert server.sessions.num_attempts == 0
