"""Sessions of both faces of the Python client, against a real server."""

from __future__ import annotations

import asyncio
import collections
import threading

import pytest
from legato_client import (
    Answer,
    AsyncClient,
    CaptionTask,
    Client,
    DetectTask,
    FrameDelta,
    FrameDropped,
    FrameResult,
    FrameStamp,
    InvalidArgument,
    Preempted,
    Session,
)

from tests.e2e.scenes import overlap, two_shapes
from tests.e2e.server import Server

SCENE = two_shapes()
JPEG = SCENE.file("JPEG", quality=95)
CIRCLE = DetectTask("red circle", task_id="circle")


def test_a_video(client: Client) -> None:
    """Every frame of a stream is answered in order, with its own stamp, on the right place."""
    with client.session([CIRCLE], policy="every_frame") as session:

        def feed() -> None:
            for number in range(1, 7):
                scene = two_shapes(number * 4)
                stamp = FrameStamp("camera", 1_000_000_007 * number, number)
                session.send(scene.file("JPEG", quality=95), stamp=stamp)
            session.finish()

        feeder = threading.Thread(target=feed)
        feeder.start()
        answers = [answer for answer in session if isinstance(answer, FrameResult)]
        feeder.join()
    assert [answer.sequence for answer in answers] == [*range(1, 7)]
    for number, answer in enumerate(answers, 1):
        assert answer.stamp == FrameStamp("camera", 1_000_000_007 * number, number)
        (found,) = answer.result.objects  # type: ignore[union-attr] # a DetectTask's
        assert overlap(found.box, two_shapes(number * 4).boxes["red circle"]) > 0.6


async def test_too_many_frames(server: Server) -> None:
    """Frames sent as fast as the server takes them: each has its results or its drop, once."""
    outcomes: collections.Counter[int] = collections.Counter()
    async with AsyncClient(server.address) as client, client.session([CIRCLE]) as session:

        async def feed() -> None:
            for _ in range(40):
                await session.send(JPEG)
            await session.finish()

        feeder = asyncio.create_task(feed())
        async for answer in session:
            if isinstance(answer, FrameDropped) or (
                isinstance(answer, FrameResult) and answer.last_for_frame
            ):
                outcomes[answer.sequence] += 1
        await feeder
        stats = session.stats
    assert outcomes == dict.fromkeys(range(1, 41), 1)
    assert stats.sent == stats.answered + stats.dropped == 40


def test_deltas_and_changes(client: Client) -> None:
    """Deltas come before their result, read late or not, where the window has room for all.

    Tasks are changed, and a bad image fails alone.
    """
    with client.session([CIRCLE], stream_deltas=True, answer_window=8) as session:
        session.send(JPEG)
        *deltas, end = take_frame(session)
        assert deltas
        assert all(isinstance(delta, FrameDelta) for delta in deltas)
        assert isinstance(end, FrameResult)
        session.update_tasks([CaptionTask("short", task_id="caption")])
        session.send(b"no image")
        (*_, failed) = take_frame(session)
        assert isinstance(failed, FrameResult)
        assert failed.task_id == "caption"
        assert isinstance(failed.outcome, InvalidArgument)


def test_an_operator_ends_it(client: Client) -> None:
    """A session that an operator stops fails as Preempted."""
    with client.session([CIRCLE]) as session:
        client.abort(session_id=session.terms.session_id)
        with pytest.raises(Preempted):
            next(session)


def take_frame(session: Session) -> list[Answer]:
    """The answers of one frame."""
    answers: list[Answer] = []
    for answer in session:
        answers.append(answer)
        if isinstance(answer, FrameResult) and answer.last_for_frame:
            break
    return answers
