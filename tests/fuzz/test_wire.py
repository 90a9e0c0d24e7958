"""Damaged and random messages of every method, to a whole server."""

import random

import grpc
import pytest
import structlog
from legato.v1 import session_pb2
from legato_client._grpc.transport import ServerStatus

from tests.fuzz.messages import disturbed, methods, request_of
from tests.fuzz.mutation import mutate
from tests.fuzz.seeds import STREAMS_IN, STREAMS_OUT, messages
from tests.service.harness import running

MUTANTS = 2000
SEED = 16
C = grpc.StatusCode
TYPED = {C.OK, C.INVALID_ARGUMENT, C.NOT_FOUND, C.FAILED_PRECONDITION, C.ALREADY_EXISTS}
ANY = TYPED | {C.UNIMPLEMENTED, C.RESOURCE_EXHAUSTED, C.DEADLINE_EXCEEDED}
BUGS = ("uncaught_exception", "internal_error")
RANDOM = 40  # requests of each method
LIVE = ("Watch", "WatchTimeline")  # streams without an end
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
        error = await status.resolve(error)
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


def random_requests(method, descriptor, chance):
    """The messages of one call, random ones or well-formed ones with a field that is changed."""
    known = messages().get(method, ())
    if known and chance.random() < 0.8:
        sent = [disturbed(each, chance) if chance.random() < 0.5 else each for each in known]
    else:
        sent = [request_of(descriptor, chance) for _ in range(3)]
    if method.endswith("/Session") and chance.random() < 0.8:
        sent[0] = session_pb2.SessionRequest(open=session_pb2.SessionOpen(stream_deltas=True))
    return sent if descriptor.client_streaming else [chance.choice(sent)]


async def outcome(channel, method, descriptor, sent):
    """The code of a call with these messages, its text, and its responses."""
    kind = f"{'stream' if descriptor.client_streaming else 'unary'}"
    kind += f"_{'stream' if descriptor.server_streaming else 'unary'}"
    bodies = [each.SerializeToString() for each in sent]
    timeout = 0.05 if method.endswith(LIVE) else 60
    start = getattr(channel, kind)(method)
    call = start(iter(bodies) if descriptor.client_streaming else bodies[0], timeout=timeout)
    status, responses = ServerStatus(call), []
    try:
        if not descriptor.server_streaming:
            return C.OK, "", [await call]
        responses += [each async for each in call]
    except grpc.aio.AioRpcError as error:
        error = await status.resolve(error)
        return error.code(), error.details() or "", responses
    return C.OK, "", responses


@pytest.mark.timeout(600)
async def test_random_messages_end_with_a_typed_status():
    """Of every method that the descriptors name, no request is called a fault of the server."""
    chance = random.Random(SEED)
    drain = "/legato.v1.AdminService/Drain"  # last: the server takes no calls after it
    order = sorted(methods(), key=lambda each: each[0] == drain)
    ends: dict[str, set[grpc.StatusCode]] = {}
    with structlog.testing.capture_logs() as logs:
        async with running(depth_switch=True) as server:
            for method, descriptor in order:
                for _ in range(RANDOM if method != drain else 1):
                    sent = random_requests(method, descriptor, chance)
                    code, text, responses = await outcome(server.channel, method, descriptor, sent)
                    assert code in ANY, (method, code, text, sent)
                    ends.setdefault(method, set()).add(code)
                    if method.endswith("/Session"):
                        for each in map(session_pb2.SessionResponse.FromString, responses):
                            failed = each.result.result.error
                            assert failed.code != C.INTERNAL.value[0], (failed, sent)
    assert [line for line in logs if line["event"] in BUGS] == []
    assert sum(C.OK in codes for codes in ends.values()) > len(ends) // 2
