"""Metadata: read once, checked, passed to the engine and to the log."""

import json

import pytest
import structlog
from legato.v1 import inference_pb2, server_pb2, task_pb2
from legato_engine import errors

from tests.service.fakes import FakeEngine, answer
from tests.service.harness import refusal, running
from tests.service.rpc.test_middleware import lines_of

QUESTION = inference_pb2.QueryRequest(question="How many?")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))
STREAM = inference_pb2.GenerateRequest(task=TASK)
ALL = (
    ("legato-priority", "-7"),
    ("legato-tenant", "arm.1"),
    ("legato-client", "python/0.1"),
    ("x-request-id", "proxy-1"),
)


def ask(server, rpc, metadata):
    """Start a call of any kind, to be awaited."""
    if rpc == "Query":
        return server.inference.Query(QUESTION, metadata=metadata)
    if rpc == "RunTasks":
        several = inference_pb2.RunTasksRequest(tasks=[TASK, TASK])
        return server.inference.RunTasks(several, metadata=metadata)
    return server.inference.Generate(STREAM, metadata=metadata).read()


@pytest.mark.parametrize("rpc", ["Query", "RunTasks", "Generate"])
async def test_priority_and_tenant_reach_the_engine(rpc):
    """Every request of the call carries them, whatever the RPC; without metadata the defaults."""
    async with running() as server:
        await ask(server, rpc, ALL)
        assert server.engine.requests
        for request in server.engine.requests:
            assert (request.priority, request.tenant) == (-7, "arm.1")
        server.engine.requests.clear()
        await ask(server, rpc, ())
        for request in server.engine.requests:
            assert (request.priority, request.tenant) == (0, "")


async def test_metadata_is_in_the_log_line():
    """The record of a call has the values of its metadata, and no empty fields."""
    with structlog.testing.capture_logs() as logs:
        async with running() as server:
            await ask(server, "Query", ALL)
            await ask(server, "Query", ())
    record, silent = lines_of(logs)
    assert (record["tenant"], record["priority"], record["client"]) == ("arm.1", -7, "python/0.1")
    assert record["request_id"] == "proxy-1"
    assert not {"tenant", "priority", "client", "trace_id", "previous_attempts"} & set(silent)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("legato-priority", "101"),
        ("legato-priority", "-101"),
        ("legato-priority", "1.5"),
        ("legato-priority", ""),
        ("legato-priority", "+1"),
        ("legato-priority", "1000000000000000000000"),
        ("legato-tenant", ""),
        ("legato-tenant", "a b"),
        ("legato-tenant", "x" * 65),
        ("legato-client", "x" * 129),
        ("x-request-id", "a/b"),
        ("x-request-id", "x" * 65),
    ],
)
async def test_malformed_metadata_is_refused_by_its_key(key, value):
    """INVALID_FIELD names the metadata key, and the engine gets no request."""
    async with running() as server:
        failed = await refusal(ask(server, "Query", ((key, value),)))
        assert not server.engine.requests
    assert failed.reason == "INVALID_FIELD"
    assert failed.details["BadRequest"].field_violations[0].field == f"metadata.{key}"
    assert failed.details["ErrorInfo"].metadata["field"] == f"metadata.{key}"


async def test_a_repeated_key_is_refused():
    """A key with two values is ambiguous."""
    twice = (("legato-tenant", "a"), ("legato-tenant", "b"))
    async with running() as server:
        failed = await refusal(ask(server, "Query", twice))
    assert failed.details["BadRequest"].field_violations[0].field == "metadata.legato-tenant"


async def test_the_limits_of_metadata_are_accepted():
    """The least and the greatest of every key pass."""
    edges = (
        (("legato-priority", "-100"), ("legato-tenant", "a"), ("legato-client", "")),
        (("legato-priority", "100"), ("legato-tenant", "x" * 64), ("legato-client", "x" * 128)),
    )
    async with running() as server:
        for metadata in edges:
            assert (await ask(server, "Query", metadata)).answer
        assert [request.priority for request in server.engine.requests] == [-100, 100]


async def test_metadata_is_read_for_every_rpc():
    """An RPC that does not use the engine refuses malformed metadata too, and echoes the id."""
    async with running() as server:
        call = server.info.GetServerInfo(
            server_pb2.GetServerInfoRequest(), metadata=(("x-request-id", "mine"),)
        )
        await call
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"


async def test_an_exceeded_quota_is_described():
    """RESOURCE_EXHAUSTED carries the quota, its owner and the retry delay."""
    engine_error = errors.QuotaExceeded(
        "at most 2 requests of a tenant may wait",
        quota="waiting_per_tenant",
        tenant="arm.1",
        limit=2,
        actual=2,
        retry_after_ms=500,
    )

    def refuse(engine, stream):
        engine.fail(stream, engine_error)

    async with running(FakeEngine(refuse)) as server:
        failed = await refusal(ask(server, "Query", ALL))
    assert failed.reason == "QUOTA_EXCEEDED"
    assert failed.details["QuotaFailure"].violations[0].subject == "tenant:arm.1"
    assert failed.details["ErrorInfo"].metadata["limit"] == "2"
    assert 400 <= failed.details["RetryInfo"].retry_delay.ToMilliseconds() <= 600
    assert 400 <= int(failed.trailers["grpc-retry-pushback-ms"]) <= 600


async def test_a_high_priority_is_judged_by_the_engine():
    """The service's estimate is for the end of the queue, so it refuses no higher priorities."""
    engine = FakeEngine()
    engine.estimated_wait = 90.0
    async with running(engine) as server:
        high = (("legato-priority", "1"),)
        assert (await server.inference.Query(QUESTION, timeout=5, metadata=high)).answer
        failed = await refusal(server.inference.Query(QUESTION, timeout=5))
    assert failed.reason == "DEADLINE_UNREACHABLE"


async def test_retries_are_counted():
    """The attempts that gRPC counts are in the log record."""

    def fail_once(engine, stream):
        if len(engine.requests) == 1:
            engine.fail(stream, errors.EngineLost("died", retry_after_ms=1))
        else:
            answer(engine, stream)

    policy = {
        "maxAttempts": 2,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    options = [("grpc.service_config", json.dumps(config))]
    with structlog.testing.capture_logs() as logs:
        async with running(FakeEngine(fail_once), options) as server:
            await server.inference.Query(QUESTION)
    first, second = lines_of(logs)
    assert "previous_attempts" not in first
    assert second["previous_attempts"] == 1
