"""The ends of a session, after which nothing is left of it."""

import asyncio
from collections import Counter

import grpc
import pytest
from legato.v1 import inference_pb2, media_pb2, session_pb2, task_pb2
from legato_engine.types import RequestKey
from legato_service.arguments import parse
from legato_service.session.frames import FrameRunner
from legato_service.session.session import Session

from tests.service.fakes import FakeEngine, answer, begin, hold
from tests.service.harness import image_message, no_collections, refusal, remaining, running, until
from tests.service.session.client import (
    DETECT,
    QUERY,
    answer_all,
    begun,
    opening,
    session,
    settled,
)

CANCELLED = task_pb2.FINISH_REASON_CANCELLED


async def test_half_close_finishes_what_came_before():
    """Running and waiting frames get results, then the session ends with OK."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.frame(2)
        await client.done()
        server.engine.script = answer
        answer_all(server.engine)
        await client.end()
        assert client.whole == {1, 2}
        await settled(server)


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_client_that_leaves_frees_everything(way):
    """A cancelled call or closed channel aborts running frames; waiting ones never start."""
    async with running(FakeEngine(begin)) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            there = type(server)(server.server, server.engine, server.port, channel)
            async with session(there, max_in_flight=2, standing_tasks=[DETECT, QUERY]) as client:
                for sequence in range(1, 6):
                    await client.frame(sequence)
                await begun(server, 4)
                if way == "cancel":
                    client.call.cancel()
                else:
                    await channel.close()
                await settled(server)
        assert len(server.engine.requests) == 4
        assert Counter(server.engine.aborted) == Counter(
            request.request_id for request in server.engine.requests
        )


async def test_sessions_cancelled_at_any_step_leave_nothing():
    """A session that is cancelled during its first steps leaves nothing."""
    async with running(FakeEngine(hold)) as server:
        for steps in range(0, 60, 3):
            call = server.sessions.Session()
            await call.write(session_pb2.SessionRequest(open=opening()))
            stamp = media_pb2.FrameStamp(sequence=1)
            frame = session_pb2.Frame(stamp=stamp, image=image_message())
            await call.write(session_pb2.SessionRequest(frame=frame))
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()
        await settled(server)


@pytest.mark.parametrize("way", ["half-close", "cancel", "breach", "operator"])
async def test_a_session_leaves_nothing_to_collect(way):
    """A session is in no reference cycle: all that it held is freed at its end."""
    async with running(FakeEngine(hold)) as server:
        with no_collections():
            others = remaining(Session, FrameRunner)  # other tests' that something still holds
            async with session(server) as client:
                await client.frame(1)
                await begun(server)
                if way == "half-close":
                    answer_all(server.engine)
                    await client.done()
                    await client.end()
                elif way == "breach":
                    await client.send(open={})
                    await client.failure()
                elif way == "operator":
                    server.server.sessions.abort_all()
                    await client.failure()
            await settled(server)
            await until(lambda: remaining(Session, FrameRunner).keys() <= others.keys())


async def test_a_drain_says_go_away():
    """Sessions get the reason, later frames are dropped, running ones end, then UNAVAILABLE."""
    async with running(FakeEngine(begin)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        draining = asyncio.create_task(server.server.drain(60))
        await client.wait_for(lambda: "go_away" in client.kinds())
        (away,) = [each.go_away for each in client.messages if each.HasField("go_away")]
        assert 0 < away.time_left.ToMilliseconds() <= 60_000
        assert away.reason.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await client.frame(2)
        await client.outcome(2)
        assert client.dropped[2].reason == session_pb2.DROP_REASON_GOING_AWAY
        assert client.dropped[2].frame_credits == 0
        answer_all(server.engine)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "DRAINING"
        client.balance()
        assert await draining
        refused = await refusal(server.inference.Query(inference_pb2.QueryRequest(question="?")))
        assert refused.reason == "DRAINING"


async def test_a_drain_ends_with_its_grace():
    """Work that does not end in time is stopped with partial results, and the drain succeeds."""
    async with running(FakeEngine(hold)) as server, session(server, max_in_flight=1) as client:
        await client.frame(1)
        await begun(server)
        await client.frame(2)
        await until(lambda: len(client.sent) == 2)
        assert await server.server.drain(1.2)
        assert (await client.failure()).reason == "DRAINING"
        client.balance()
        assert client.results[1][0].finish_reason == CANCELLED
        await settled(server)


async def test_a_session_has_a_greatest_age():
    """It gets go_away with an OK reason, and ends with OK."""
    async with running(max_session_age=0.1) as server, session(server) as client:
        await client.end()
        assert client.kinds()[-1] == "go_away"
        assert client.messages[-1].go_away.reason.code == 0
        await settled(server)


async def test_an_operator_ends_a_session():
    """ABORTED PREEMPTED ends the named session, or all; an unknown id is reported."""
    async with running(FakeEngine(begin)) as server:
        async with session(server) as one, session(server) as two, session(server) as three:
            await one.frame(1)
            await begun(server)
            registry = server.server.sessions
            assert registry.abort(RequestKey(one.opened.session_id))
            failed = await one.failure()
            assert failed.code is grpc.StatusCode.ABORTED
            assert failed.reason == "PREEMPTED"
            await until(lambda: not server.engine.streams)
            assert not registry.abort(RequestKey(one.opened.session_id))
            assert registry.abort_all() == 2
            for each in (two, three):
                assert (await each.failure()).reason == "PREEMPTED"
        await settled(server)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--max-sessions", "0"], "at least 1"), (["--max-session-age", "0"], "above 0")],
)
def test_invalid_settings_are_refused(arguments, message, capsys):
    """The exit code is 2, and the message gives the reason."""
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err
