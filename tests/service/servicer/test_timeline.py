"""WatchTimeline."""

import asyncio

from google.protobuf import duration_pb2
from legato.v1 import admin_pb2
from legato_engine.ipc.messages import Load, PipelineStats, TimelineBatch, TimelineSpan

from tests.service.harness import refusal, running, until

SPAN = TimelineSpan("device compute", "forward", 5_000_000_000, 2_000, 7, "decode", 3, 1, 2)
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
        )
        assert message.decode_steps.predicted_gain == 0.25
        assert message.decode_steps.observed_gain == 0.125
        call.cancel()
        await until(lambda: server.engine.watched == [True, False])


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
