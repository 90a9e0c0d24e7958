"""Calls of one client over several connections."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, server_pb2, server_pb2_grpc
from legato_client import AsyncClient, CaptionTask, Started
from legato_client._grpc import transport

from tests.clients.python.fake_server import INFO

PATIENCE = 60.0  # seconds
LIMIT = transport.CALLS_PER_CHANNEL
MANY = 2 * LIMIT + 1


class Held(inference_pb2_grpc.InferenceServiceServicer, server_pb2_grpc.ServerServiceServicer):
    """Begins every stream, and ends none until the test does."""

    def Query(self, *_):
        """Do nothing: as all below, it is not called."""

    Caption = Detect = Point = Segment = RunTasks = ListModels = Query

    def __init__(self):
        self.may_end = asyncio.Event()
        self.peers = set()

    async def Generate(self, _request, context):
        """Begin, wait, end."""
        self.peers.add(context.peer())
        started = inference_pb2.Started(request_id="r", model="fake", input_tokens=1)
        yield inference_pb2.GenerateResponse(index=0, started=started)
        await self.may_end.wait()
        finished = inference_pb2.Finished(info=INFO)
        finished.result.caption.caption = "a cat"
        yield inference_pb2.GenerateResponse(index=1, finished=finished)

    async def GetServerInfo(self, _request, _context):
        """Answer at once."""
        return server_pb2.GetServerInfoResponse(name="legato")


@contextlib.asynccontextmanager
async def serving():
    """A server that begins as many calls of a connection as a channel carries."""
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", LIMIT)])
    held = Held()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(held, server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(held, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield held, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.timeout(120)
async def test_every_stream_begins():
    """More streams than a server begins on one connection, and a call beside them, all begin."""
    async with serving() as (held, target), AsyncClient(target, token="") as client:
        begun = asyncio.Semaphore(0)

        async def read():
            async for event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                if isinstance(event, Started):
                    begun.release()

        readers = [asyncio.create_task(read()) for _ in range(MANY)]
        for _ in readers:
            await asyncio.wait_for(begun.acquire(), PATIENCE)
        assert (await client.server_info(timeout=PATIENCE)).name == "legato"
        assert len(held.peers) == 3
        held.may_end.set()
        await asyncio.gather(*readers)
        assert [each.num_calls for each in client._connection._channels] == [0, 0, 0]
        for _ in range(3):
            async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                pass
        assert len(held.peers) == 3


async def test_two_clients_have_connections_of_their_own():
    """The calls of one client are not limited by those of another one of the same process."""
    async with serving() as (held, target):
        held.may_end.set()
        for _ in range(2):
            async with AsyncClient(target, token="") as client:
                async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                    pass
        assert len(held.peers) == 2


async def test_calls_that_end_early_make_room():
    """Streams that are closed, cancelled or refused count no longer."""
    async with serving() as (_held, target), AsyncClient(target, token="") as client:
        for _ in range(3):
            events = client.generate(None, CaptionTask(), timeout=PATIENCE)
            await anext(events)
            await events.aclose()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    async for _event in client.generate(None, CaptionTask(), timeout=PATIENCE):
                        pass
        assert [each.num_calls for each in client._connection._channels] == [0]
