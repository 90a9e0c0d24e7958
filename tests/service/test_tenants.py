"""The service keeps tenants apart: whatever one asks, another cannot tell."""

import functools
from typing import Any

import grpc
from legato.v1 import admin_pb2, inference_pb2, task_pb2

from tests.service.fakes import FakeEngine, answer, hold
from tests.service.harness import refusal, running, until
from tests.service.session.client import SessionClient, opening

NAMES = ("acme", "rival")
TASK = task_pb2.Task(query=task_pb2.QueryTask(question="How many?"))


def of(tenant, **more):
    """Return the metadata of a tenant's call."""
    values: Any = {"legato-tenant": tenant, **more}
    return tuple(values.items())


async def test_sessions_of_two_tenants_may_have_one_id():
    """A session keeps its id though another tenant has one of that id; its own second has not."""
    async with running(FakeEngine(hold)) as server:
        clients = []
        for tenant in (*NAMES, "acme"):
            call = server.sessions.Session(metadata=of(tenant, **{"x-request-id": "robot"}))
            clients.append(SessionClient(call))
            await clients[-1].send(open=opening())
            await clients[-1].wait_for(lambda: clients[-1].messages)
        ids = [client.opened.session_id for client in clients]
        assert ids[:2] == ["robot", "robot"]
        assert ids[2] != "robot"
        for client in clients:
            client.call.cancel()


async def test_an_operator_names_a_session_of_one_tenant_or_of_all():
    """Abort by a session's id is for the named tenant, or without one for every tenant."""
    async with running(FakeEngine(hold)) as server:
        clients = [
            SessionClient(server.sessions.Session(metadata=of(name, **{"x-request-id": "robot"})))
            for name in (*NAMES, "third")
        ]
        for client in clients:
            await client.send(open=opening())
            await client.wait_for(functools.partial(len, client.messages))
        abort = admin_pb2.AbortRequest(session_id="robot")
        assert (await server.admin.Abort(abort, metadata=of("acme"))).aborted == 1
        assert (await clients[0].failure()).reason == "PREEMPTED"
        assert (await server.admin.Abort(abort)).aborted == 2


async def test_a_reply_is_kept_for_its_tenant_only():
    """The same id and content of another tenant runs again; of the same tenant it does not."""
    async with running() as server:
        request = inference_pb2.QueryRequest(question="How many?")
        request.options.request_id = "r-1"
        for tenant, runs in (("acme", 1), ("rival", 2), ("acme", 2)):
            await server.inference.Query(request, metadata=of(tenant))
            assert len(server.engine.requests) == runs


async def test_an_id_in_use_is_no_duplicate_for_another_tenant():
    """A stream's request id is refused to its own tenant and to no other."""
    async with running(FakeEngine(hold)) as server:
        options = inference_pb2.RequestOptions(request_id="r-1")
        stream = server.inference.Generate(
            inference_pb2.GenerateRequest(task=TASK, options=options), metadata=of("acme")
        )
        await until(lambda: bool(server.engine.streams))
        server.engine.script = answer
        again = inference_pb2.QueryRequest(question="How many?", options=options)
        refused = await refusal(server.inference.Query(again, metadata=of("acme")))
        assert refused.code is grpc.StatusCode.ALREADY_EXISTS
        assert (await server.inference.Query(again, metadata=of("rival"))).answer
        stream.cancel()
