"""Heartbeats, credits and slow readers."""

import grpc
from legato.v1 import admin_pb2, session_pb2

from tests.service.fakes import FakeEngine, hold
from tests.service.harness import running
from tests.service.session.client import (
    SessionClient,
    opening,
    seconds,
    session,
    settled,
)

EVERY = session_pb2.FRAME_POLICY_EVERY_FRAME


async def test_silence_is_broken_by_heartbeats():
    """The interval is at least 100 ms, whatever was requested; `index` counts heartbeats too."""
    async with running() as server, session(server, heartbeat_interval=seconds(0.001)) as client:
        assert client.opened.heartbeat_interval.ToMilliseconds() == 100
        await client.wait_for(lambda: client.kinds().count("heartbeat") >= 3)
        await client.done()
        await client.end()


async def test_an_idle_session_is_not_ended():
    """Neither the default deadlines nor the limit on slow readers end it."""
    async with (
        running(unary_deadline=0.3, stream_deadline=0.3, stall_timeout=0.3) as server,
        session(server, heartbeat_interval=seconds(0.1)) as client,
    ):
        await client.wait_for(lambda: client.kinds().count("heartbeat") >= 6)
        await client.done()
        await client.end()


async def test_a_deadline_of_the_client_ends_it():
    """The client's own deadline holds, and frees running work."""
    async with running(FakeEngine(hold)) as server:
        client = SessionClient(server.sessions.Session(timeout=0.5))
        await client.send(open=opening())
        await client.frame(1)
        assert (await client.failure()).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await settled(server)


async def test_results_wait_for_credits():
    """Without credits results wait, the oldest become drops; a grant sends the rest."""
    async with (
        running() as server,
        session(server, frame_policy=EVERY, response_credits=1) as client,
    ):
        for sequence in range(1, 41):
            await client.frame(sequence)
            await client.wait_for(lambda: client.accepted[-1:] == [sequence])  # noqa: B023 - called before the next
        assert len(client.whole) == 1
        assert {each.reason for each in client.dropped.values()} == {
            session_pb2.DROP_REASON_OVERLOADED
        }
        await client.send(grant=session_pb2.GrantCredits(responses=2))
        await client.wait_for(lambda: len(client.whole) == 3)
        await client.done()
        await client.end()
        assert client.dropped
        await settled(server)


async def test_a_client_that_grants_nothing_is_disconnected():
    """ABORTED CLIENT_TOO_SLOW once results waited for the timeout."""
    async with running(stall_timeout=0.1) as server, session(server, response_credits=1) as client:
        await client.frame(1)
        await client.outcome(1)
        await client.frame(2)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.ABORTED
        assert failed.reason == "CLIENT_TOO_SLOW"
        await settled(server)


async def test_load_counts_the_sessions():
    """GetLoad counts the open sessions."""
    async with running() as server:
        async with session(server), session(server):
            load = await server.admin.GetLoad(admin_pb2.GetLoadRequest())
            assert load.sessions == 2
        await settled(server)
