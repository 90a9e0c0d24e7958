"""How sessions of both faces begin and end, well and badly."""

from __future__ import annotations

import contextlib
import threading

import grpc
import pytest
from google.rpc import status_pb2
from legato.v1 import session_pb2
from legato_client import (
    Cancelled,
    CaptionTask,
    DeadlineExceeded,
    GoAway,
    IncompleteStream,
    NotFound,
    Preempted,
    Unavailable,
)

from tests.clients.python.face import until
from tests.clients.python.fake_server import Conversation, Failure, failure, ignore

JPEG = b"picture"
CAPTION = CaptionTask(task_id="a")


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


@pytest.mark.parametrize(
    "wrong", [{"policy": "newest"}, {"when_full": "block"}, {"answer_window": 0}]
)
def test_bad_plans(connect, server, wrong):
    """A plan that cannot be is refused before anything is sent, with what could be."""
    with pytest.raises(ValueError, match="must be"), connect([CAPTION], **wrong):
        pass
    assert server.sessions.num_attempts == 0
