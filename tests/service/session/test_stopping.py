"""Frames that are cancelled, superseded or too old."""

from legato.v1 import media_pb2, session_pb2, task_pb2

from tests.service.fakes import FakeEngine, answer, begin, hold
from tests.service.harness import running, until
from tests.service.session.client import (
    DETECT,
    QUERY,
    answer_all,
    begun,
    seconds,
    session,
    settled,
)

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
