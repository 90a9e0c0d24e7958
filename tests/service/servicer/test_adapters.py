"""Adapters in requests: passed to the engine, and errors by field."""

from __future__ import annotations

import msgspec
import pytest
from legato.v1 import inference_pb2, server_pb2, task_pb2
from legato_engine.errors import AdapterNotFound, AdapterUnusable

from tests.service.fakes import MODEL, FakeEngine, answer, refuse
from tests.service.harness import image_message, refusal, running
from tests.service.session.client import session, settled

NAME = "cups@12"
DETECT = task_pb2.Task(detect=task_pb2.DetectTask(object="cup"))
OPTIONS = inference_pb2.RequestOptions(adapter=NAME)


def engine_of(script=answer):
    """Return an engine with adapters."""
    engine = FakeEngine(script)
    engine.model = msgspec.structs.replace(MODEL, adapters=True)
    return engine


async def test_every_rpc_passes_the_adapter_on():
    """Unary calls, streams, several tasks and sessions all pass the name on."""
    pb = inference_pb2
    async with running(engine_of()) as server:
        await server.inference.Query(pb.QueryRequest(question="?", options=OPTIONS))
        stream = server.inference.Generate(
            pb.GenerateRequest(task=DETECT, image=image_message(), options=OPTIONS)
        )
        assert [event async for event in stream]
        await server.inference.RunTasks(
            pb.RunTasksRequest(tasks=[DETECT], image=image_message(), options=OPTIONS)
        )
        async with session(server, adapter=NAME) as client:
            await client.frame(1)
            await client.outcome(1)
        assert [each.adapter for each in server.engine.requests] == [NAME] * 4


@pytest.mark.parametrize("adapters", [False, True])
async def test_the_capability_is_the_engines(adapters):
    """A server whose engine takes adapters announces them, any other does not."""
    engine = engine_of() if adapters else FakeEngine()
    async with running(engine) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert ("adapters" in info.capabilities) == adapters


ERRORS = [
    (AdapterNotFound("none", resource=NAME), "NOT_FOUND", "ADAPTER_NOT_FOUND"),
    (AdapterUnusable("its rank is 17"), "INVALID_ARGUMENT", "INVALID_FIELD"),
]


@pytest.mark.parametrize(("error", "code", "reason"), ERRORS)
async def test_what_is_wrong_with_an_adapter_fails_the_call(error, code, reason):
    """A bad adapter fails a call of one task or several, by its field in the options."""
    several = inference_pb2.RunTasksRequest(
        tasks=[DETECT, DETECT], image=image_message(), options=OPTIONS
    )
    single = inference_pb2.QueryRequest(question="?", options=OPTIONS)
    async with running(engine_of(refuse(error))) as server:
        for call in (server.inference.Query(single), server.inference.RunTasks(several)):
            failed = await refusal(call)
            assert (failed.code.name, failed.reason) == (code, reason)
            if code == "INVALID_ARGUMENT":
                (violation,) = failed.details["BadRequest"].field_violations
                assert violation.field == "options.adapter"
                assert "rank is 17" in failed.message


async def test_a_session_names_its_own_field():
    """In a session a bad adapter fails each task, by the field of the opening."""
    error = AdapterUnusable("its rank is 17")
    async with running(engine_of(refuse(error))) as server:
        async with session(server, adapter=NAME) as client:
            await client.frame(1)
            await client.outcome(1)
            assert "open.adapter: its rank is 17" in client.results[1][0].error.message
        await settled(server)
