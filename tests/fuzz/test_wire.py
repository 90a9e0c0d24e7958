"""Damaged messages of every method, to a whole server."""

import random

import grpc
import pytest
from legato_client._transport.async_status import ServerStatus

from tests.fuzz.mutation import mutate
from tests.fuzz.seeds import STREAMS_IN, STREAMS_OUT, messages
from tests.service.harness import running

MUTANTS = 2000
SEED = 16
C = grpc.StatusCode
TYPED = {C.OK, C.INVALID_ARGUMENT, C.NOT_FOUND, C.FAILED_PRECONDITION, C.ALREADY_EXISTS}
PARSER = ("protobuf", "Error parsing", "DecodeError", "Exception", "Traceback")


async def end_of(channel, method, bodies):
    """The code and message of a call whose messages are these bytes."""
    streams_in = method.endswith(STREAMS_IN)
    streams_out = method.endswith(STREAMS_OUT)
    kind = ("stream" if streams_in else "unary", "stream" if streams_out else "unary")
    call = getattr(channel, "_".join(kind))(method)(
        iter(bodies) if streams_in else bodies[0], timeout=60
    )
    status = ServerStatus(call)  # a call that ends while it still sends gets an error of its own
    try:
        if streams_out:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        error = await status.instead_of(error)
        return error.code(), error.details() or ""
    return C.OK, ""


def mutants(count):
    """Damaged messages of all methods in turn; the others of a stream stay whole."""
    chance = random.Random(SEED)
    methods = list(messages().items())
    for number in range(count):
        method, sent = methods[number % len(methods)]
        bodies = [message.SerializeToString() for message in sent]
        if not method.endswith(STREAMS_IN):
            bodies = [chance.choice(bodies)]
        at = chance.randrange(len(bodies))
        bodies[at] = mutate(bodies[at], chance) or b"\xff"
        yield method, bodies


@pytest.mark.timeout(600)
async def test_damaged_messages_end_with_a_typed_status():
    """Of 2,000 mutants none is called a fault of the server, and no parser's text is sent."""
    ends: dict[grpc.StatusCode, int] = {}
    async with running() as server:
        for method, bodies in mutants(MUTANTS):
            code, text = await end_of(server.channel, method, bodies)
            assert code in TYPED, (method, code, text, bodies)
            assert text == "the request is not a valid protobuf message" or not any(
                word in text for word in PARSER
            ), text
            ends[code] = ends.get(code, 0) + 1
    assert ends[C.OK] > MUTANTS // 20
    assert ends[C.INVALID_ARGUMENT] > MUTANTS // 20


async def test_undamaged_messages_are_answered():
    """The control: every seed but those that name what is not there."""
    async with running() as server:
        for method, sent in messages().items():
            bodies = [message.SerializeToString() for message in sent]
            code, text = await end_of(server.channel, method, bodies)
            expected = {C.OK} if "Delete" not in method else {C.NOT_FOUND}
            if method.endswith("Detect"):
                expected = {C.FAILED_PRECONDITION, C.INVALID_ARGUMENT}  # the shared image
            assert code in expected, (method, code, text)
