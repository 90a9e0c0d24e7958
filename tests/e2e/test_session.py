"""A session with a real engine: frames of a video, answered or dropped, and nothing left."""

import signal
from contextlib import asynccontextmanager

import grpc
from legato.v1 import session_pb2, session_pb2_grpc, task_pb2

from tests.e2e.scenes import long_stream, overlap, two_shapes
from tests.e2e.server import RANDOM, Server
from tests.service.session.client import SessionClient

STANDING = [
    task_pb2.Task(task_id="circle", detect=task_pb2.DetectTask(object="red circle")),
    task_pb2.Task(
        task_id="count", query=task_pb2.QueryTask(question="How many circles are there?")
    ),
]
VIDEO = [two_shapes(offset=offset) for offset in range(12)]


@asynccontextmanager
async def session(address, **fields):
    """An open session on that server."""
    async with grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(session_pb2_grpc.SessionServiceStub(channel).Session())
        await client.send(open=session_pb2.SessionOpen(**fields))
        await client.wait_for(lambda: client.messages)
        yield client


async def test_a_video_is_answered_frame_by_frame(server):
    """The newest frames are answered and truly so, the others dropped; then all is released."""
    async with session(server.address, standing_tasks=STANDING, stream_deltas=True) as client:
        for sequence, scene in enumerate(VIDEO):
            await client.frame(sequence, image=scene.message())
        await client.done()
        await client.end()
    assert {0, len(VIDEO) - 1} <= client.whole
    assert client.dropped
    for sequence in client.whole:
        results = {each.task_id: each for each in client.results[sequence]}
        assert results["count"].query.answer
        (found,) = results["circle"].detect.objects
        assert overlap(found.box, VIDEO[sequence].boxes["red circle"]) > 0.7
        assert len(client.deltas[sequence, "circle"].of("object")) == 1
    server.settle()


async def test_preempted_work_tells_what_it_has(server):
    """A long answer that a newer frame stops comes as far as it got, SUPERSEDED."""
    asked = long_stream(440)
    asked.task.task_id = "long"
    async with session(
        server.address,
        standing_tasks=[asked.task],
        frame_policy=session_pb2.FRAME_POLICY_PREEMPT,
        stream_deltas=True,
    ) as client:
        await client.frame(1, image=VIDEO[0].message())
        await client.wait_for(lambda: len(client.deltas[1, "long"].of("text")) >= 3)
        await client.send(update=session_pb2.UpdateTasks(standing_tasks=STANDING))
        await client.frame(2, image=VIDEO[1].message())
        await client.done()
        await client.end()
    (partial,) = client.results[1]
    assert partial.finish_reason == task_pb2.FINISH_REASON_SUPERSEDED
    text = "".join(each.text.text for each in client.deltas[1, "long"].of("text"))
    assert partial.query.answer == text
    assert 0 < partial.usage.output_tokens < asked.task.sampling.max_tokens
    assert len(client.results[2]) == 2
    server.settle()


async def test_a_frame_outlives_its_engine(tmp_path):
    """Its result comes from the next engine, and the session goes on."""
    asked = long_stream(max_tokens=100)
    with Server(tmp_path, *RANDOM, program=("-m", "tests.e2e.quick_service")) as server:
        async with session(
            server.address, standing_tasks=[asked.task], stream_deltas=True
        ) as client:
            await client.frame(1, image=VIDEO[0].message())
            await client.wait_for(lambda: client.deltas)
            server.kill_engine()
            await client.outcome(1)
            (result,) = client.results[1]
            assert result.WhichOneof("result") == "query"
            text = "".join(each.text.text for each in client.deltas[1, ""].of("text"))
            assert result.query.answer == text
            await client.send(update=session_pb2.UpdateTasks(standing_tasks=STANDING))
            await client.frame(2, image=VIDEO[0].message())
            await client.outcome(2)
            assert len(client.results[2]) == len(STANDING)
            await client.done()
            await client.end()
        server.settle()


async def test_a_delayed_drain_says_go_away_at_its_beginning(tmp_path):
    """During the delay sessions open and frames are answered; the next signal sends them away."""
    null = ("--model", "null", "--drain-delay", "600", "--drain-grace", "60")
    with Server(tmp_path, *null) as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("drain_delayed")
        async with session(server.address, standing_tasks=STANDING[:1]) as client:
            await client.frame(1, image=VIDEO[0].message())
            await client.wait_for(lambda: client.whole)
            assert "go_away" not in client.kinds()
            server.process.send_signal(signal.SIGTERM)
            failed = await client.failure()
        assert failed.reason == "DRAINING"
        assert "go_away" in client.kinds()
        assert server.process.wait() == 0


async def test_sigterm_says_go_away(tmp_path):
    """The frame under way is answered within the grace, and the server leaves with 0."""
    asked = long_stream(max_tokens=100)
    null = ("--model", "null", "--null-step-ms", "50", "--null-objects", "10000")
    with Server(tmp_path, "--drain-grace", "60", *null) as server:
        async with session(
            server.address, standing_tasks=[asked.task], stream_deltas=True
        ) as client:
            await client.frame(1, image=VIDEO[0].message())
            await client.wait_for(lambda: client.deltas)
            server.process.send_signal(signal.SIGTERM)
            failed = await client.failure()
        assert failed.reason == "DRAINING"
        assert "go_away" in client.kinds()
        client.balance()
        assert client.whole == {1}
        assert server.process.wait() == 0
        assert not server.blobs()
