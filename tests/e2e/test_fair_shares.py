"""Two tenants at one server: the greedy one gets what the other leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest
from legato.v1 import inference_pb2

from tests.e2e.server import Server

QUERY = "/legato.v1.InferenceService/Query"
QUESTION = inference_pb2.QueryRequest(question="What is in the image?").SerializeToString()
ASKED = 12


@pytest.fixture
def paced(tmp_path):
    """A server that runs 4 requests at a time, 32 ms or more each, and queues 32."""
    rows = ("--null-step-ms", "2", "--max-running", "4")
    queue = ("--max-waiting", "32", "--priority-seconds", "0.1")
    with Server(tmp_path, "--model", "null", *rows, *queue) as running:
        yield running


async def ask(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> str:
    """The status of a call."""
    query: Any = channel.unary_unary(QUERY)
    try:
        await query(QUESTION, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("greedy_priority", [pytest.param("0", marks=pytest.mark.slow), "1"])
async def test_60_greedy_connections_leave_a_small_tenant_its_answers(paced, greedy_priority):
    """It asks again after each answer, and is answered each time, whatever priority they claim."""
    done = asyncio.Event()
    greedy: Counter[str] = Counter()
    metadata = (("legato-tenant", "greedy"), ("legato-priority", greedy_priority))
    apart = (("grpc.use_local_subchannel_pool", 1),)  # a connection each

    async def connection() -> None:
        async with grpc.aio.insecure_channel(paced.address, apart) as channel:
            while not done.is_set():
                greedy[await ask(channel, *metadata)] += 1

    callers = [asyncio.create_task(connection()) for _ in range(60)]
    while not greedy["RESOURCE_EXHAUSTED"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with grpc.aio.insecure_channel(paced.address, apart) as channel:
        small = Counter([await ask(channel, ("legato-tenant", "small")) for _ in range(ASKED)])
    done.set()
    await asyncio.gather(*callers)
    assert small["OK"] >= 0.95 * ASKED, small
    assert set(greedy) == {"OK", "RESOURCE_EXHAUSTED"}
