"""The results of frames, also of failed ones."""

import pytest
from google.protobuf import timestamp_pb2
from legato.v1 import media_pb2, session_pb2, task_pb2
from legato_engine.client.monitor import EngineState
from legato_engine.errors import ImageUndecodable, QueueFull
from legato_engine.types import CachedImage, EncodedImage

from tests.service.fakes import FakeEngine, answer, begin, refuse
from tests.service.harness import running
from tests.service.session.client import (
    DETECT,
    QUERY,
    answer_all,
    begun,
    reason_of,
    session,
    settled,
)

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
            CachedImage,
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
