"""The opening of a session."""

import grpc
import pytest
from legato.v1 import session_pb2, task_pb2

from tests.service.fakes import FakeEngine, hold
from tests.service.harness import running
from tests.service.session.client import (
    DETECT,
    QUERY,
    SessionClient,
    begun,
    opening,
    seconds,
    session,
    settled,
)

EVERY = session_pb2.FRAME_POLICY_EVERY_FRAME


async def test_a_session_is_opened_on_its_terms():
    """`opened` names id, model and granted limits; health and the list have the service."""
    async with (
        running() as server,
        session(server, max_in_flight=100, frame_policy=EVERY) as client,
    ):
        opened = client.opened
        assert opened.session_id
        assert opened.model == "fake-1"
        assert opened.max_in_flight == 8
        assert opened.frame_credits >= 1
        assert opened.heartbeat_interval.ToMilliseconds() == 10_000
        assert opened.contract_revision >= 1
        assert len(server.server.sessions) == 1
        await client.done()
        await client.end()
        await settled(server)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"frame": {"stamp": {"sequence": 1}}}, "open"),
        ({"grant": {"responses": 1}}, "open"),
        ({}, "open"),
    ],
)
async def test_nothing_comes_before_the_opening(message, field):
    """Another first message is SESSION_PROTOCOL, by its field."""
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.send(**message)
        failed = await client.failure()
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == "SESSION_PROTOCOL"
    assert failed.details["BadRequest"].field_violations[0].field == field


async def test_a_session_that_is_not_opened_ends():
    """A client that sends nothing, or leaves at once, gets an error about `open`."""
    async with running(session_open_timeout=0.05) as server:
        failed = await SessionClient(server.sessions.Session()).failure()
        assert failed.reason == "SESSION_PROTOCOL"
        client = SessionClient(server.sessions.Session())
        await client.done()
        assert (await client.failure()).reason == "SESSION_PROTOCOL"
        await settled(server)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other"}, "MODEL_NOT_FOUND"),
        ({"adapter": "cups@12"}, "ADAPTER_NOT_FOUND"),
        ({"session_name": "x" * 65}, "INVALID_FIELD"),
        ({"frame_policy": 9}, "INVALID_FIELD"),
        ({"max_frame_age": seconds(-1)}, "INVALID_FIELD"),
        ({"heartbeat_interval": seconds(0)}, "INVALID_FIELD"),
        ({"standing_tasks": [DETECT, DETECT]}, "INVALID_FIELD"),
        ({"standing_tasks": [task_pb2.Task()]}, "INVALID_FIELD"),
        ({"standing_tasks": [QUERY] * 33}, "INVALID_FIELD"),
    ],
)
async def test_an_invalid_opening_has_its_own_status(fields, reason):
    """Errors that concern every frame end the call at once."""
    async with running() as server:
        client = SessionClient(server.sessions.Session())
        await client.send(open=opening(**fields))
        assert (await client.failure()).reason == reason
        await settled(server)


async def test_no_more_sessions_than_allowed():
    """Beyond the limit a session is refused with QUEUE_FULL, until one has ended."""
    async with running(max_sessions=1) as server:
        async with session(server):
            failed = await SessionClient(server.sessions.Session()).failure()
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failed.reason == "QUEUE_FULL"
            assert failed.details["ErrorInfo"].metadata["limit"] == "1"
        await settled(server)
        async with session(server):
            pass


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"open": {}}, "SESSION_PROTOCOL"),
        ({}, "SESSION_PROTOCOL"),
        ({"frame": {}}, "SESSION_PROTOCOL"),
        ({"frame": {"stamp": {"sequence": 1}}}, "SESSION_PROTOCOL"),
        ({"cancel": {}}, "INVALID_FIELD"),
        ({"grant": {}}, "INVALID_FIELD"),
        ({"update": {"standing_tasks": [{}]}}, "INVALID_FIELD"),
    ],
)
async def test_a_protocol_error_ends_the_session(message, reason):
    """A message out of order, or without content, ends the session, and nothing is left."""
    async with running(FakeEngine(hold)) as server, session(server) as client:
        await client.frame(1)
        await begun(server)
        await client.send(**message)
        failed = await client.failure()
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.reason == reason
        await settled(server)
