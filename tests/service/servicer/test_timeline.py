"""WatchTimeline."""

import asyncio

import grpc
import msgspec
from google.protobuf import duration_pb2
from legato.v1 import admin_pb2, server_pb2
from legato_engine.client.timeline_watch import MAX_UNREAD
from legato_engine.ipc.messages import Load, PipelineStats, TimelineBatch, TimelineSpan

from tests.service.harness import refusal, running, until

SPAN = TimelineSpan("device compute", "forward", 5_000_000_000, 2_000, 7, "decode", 3, 1, 2, 4)
STEPS = PipelineStats(
    num_steps=9,
    num_tokens=20,
    rows=2.0,
    step_ms=5.0,
    forward_ms=4.0,
    sampling_ms=0.5,
    bookkeeping_ms=0.5,
    wait_ms=3.0,
    idle_ms=0.25,
    blocking_ms=6.0,
    zombie_ratio=0.0,
    predicted_gain=0.25,
    observed_gain=0.125,
)


async def test_spans_and_gains_arrive_while_a_caller_watches():
    """A batch is one message; the engine is asked to begin, and to end when the caller leaves."""
    async with running() as server:
        server.engine.load = Load(decode_steps=STEPS)
        call = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        first = await call.read()
        assert (len(first.spans), first.decode_steps.steps) == (0, 9)
        await until(lambda: server.engine.watched == [True])
        server.engine.timeline.deliver(TimelineBatch(spans=(SPAN, SPAN), decode_steps=STEPS))
        message = await call.read()
        assert len(message.spans) == 2
        assert message.spans[0] == admin_pb2.TimelineSpan(
            lane="device compute",
            name="forward",
            start_ns=5_000_000_000,
            duration_ns=2_000,
            launch=7,
            kind="decode",
            rows=3,
            riding=1,
            zombies=2,
            tokens=4,
        )
        assert message.decode_steps.predicted_gain == 0.25
        assert message.decode_steps.observed_gain == 0.125
        call.cancel()
        await until(lambda: server.engine.watched == [True, False])


async def test_a_watcher_learns_what_it_lost_and_whose_launches_come():
    """Launches are numbered in a row; those of an engine that follows a lost one count anew."""
    async with running() as server:
        call = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        first = await call.read()
        assert (first.engine_started_ns, first.lost_launches, first.pipeline_depth) == (0, 0, 0)
        await until(lambda: server.engine.watched == [True])
        for number, started in ((7, 100), (10, 100), (0, 200)):
            span = msgspec.structs.replace(SPAN, launch=number)
            server.engine.timeline.deliver(
                TimelineBatch(spans=(span,), started=started, pipeline_depth=2)
            )
        found = [await call.read() for _ in range(3)]
        assert [each.lost_launches for each in found] == [0, 2, 0]
        assert [each.engine_started_ns for each in found] == [100, 100, 200]
        assert {each.pipeline_depth for each in found} == {2}
        call.cancel()


async def test_a_slow_watcher_is_told_what_it_lost():
    """What it reads and what it lost are all launches; the newest are never among the lost."""
    count = 3 * MAX_UNREAD
    async with running(channel_options=[("grpc.http2.lookahead_bytes", 0)]) as server:
        call = server.admin.WatchTimeline(admin_pb2.WatchTimelineRequest())
        await call.read()
        await until(lambda: server.engine.watched == [True])
        for number in range(count):
            span = msgspec.structs.replace(SPAN, launch=number, kind="decode" * 20_000)
            server.engine.timeline.deliver(TimelineBatch(spans=(span,), started=1))
            await asyncio.sleep(0)
        found: list[int] = []
        lost = 0
        while not found or found[-1] != count - 1:
            message = await call.read()
            found += [each.launch for each in message.spans]
            lost += message.lost_launches
        assert found == sorted(set(found))
        assert found[0] + len(found) + lost == count
        assert lost > 0
        call.cancel()


async def test_the_depth_is_set_on_every_engine():
    """Where the server allows it, and only 1 and 2."""
    async with running(depth_switch=True) as server:
        await server.admin.SetPipelineDepth(admin_pb2.SetPipelineDepthRequest(depth=1))
        assert server.engine.depths == [1]
        for wrong in (0, 3):
            request = admin_pb2.SetPipelineDepthRequest(depth=wrong)
            found = await refusal(server.admin.SetPipelineDepth(request))
            assert found.reason == "INVALID_FIELD"
            assert found.details["BadRequest"].field_violations[0].field == "depth"
        assert server.engine.depths == [1]
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "pipeline_depth" in info.capabilities


async def test_the_depth_is_the_servers_own_unless_it_allows_changes():
    """By default there is no such method."""
    async with running() as server:
        request = admin_pb2.SetPipelineDepthRequest(depth=1)
        found = await refusal(server.admin.SetPipelineDepth(request))
        assert found.code is grpc.StatusCode.UNIMPLEMENTED
        assert server.engine.depths == []
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert "pipeline_depth" not in info.capabilities


async def test_the_duration_ends_the_call():
    """Without a batch, too."""
    async with running() as server:
        request = admin_pb2.WatchTimelineRequest(duration=duration_pb2.Duration(nanos=10_000_000))
        async with asyncio.timeout(60):
            messages = [message async for message in server.admin.WatchTimeline(request)]
        assert messages == [admin_pb2.WatchTimelineResponse()]
        assert server.engine.watched == [True, False]


async def test_a_duration_must_be_positive():
    """The field is named."""
    async with running() as server:
        request = admin_pb2.WatchTimelineRequest(duration=duration_pb2.Duration())
        found = await refusal(server.admin.WatchTimeline(request).read())
    assert found.reason == "INVALID_FIELD"
    assert found.details["BadRequest"].field_violations[0].field == "duration"
