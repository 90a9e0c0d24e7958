"""Random and damaged answers of a server, to the Python client."""

import asyncio
import random
from concurrent import futures

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from legato.v1 import session_pb2
from legato_client import AsyncClient, Client, DetectTask, LegatoError, QueryTask
from legato_client._errors import from_rpc_error, from_status
from legato_client._grpc import channel as rpcs
from legato_client._grpc.channel import StubMethod, message_of
from legato_client._session.state import SessionState

from tests.fuzz.messages import filled, mutate
from tests.service.harness import image_bytes

SEED = 16
ANSWERS = 120  # of each method
METHODS = [each for each in vars(rpcs).values() if isinstance(each, StubMethod)]
METHODS += rpcs.OF_SKILLS.values()
DETAILS = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.RequestInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_an_answer_is_a_value_or_a_legato_error(method):
    """Whatever a server fills in, and whatever becomes of the bytes on the way."""
    chance = random.Random(SEED)
    for number in range(ANSWERS):
        data = filled(method.response(), chance).SerializeToString()
        if number % 2:
            data = mutate(data, chance)
        try:
            method.parse(message_of(method.response, data))
        except LegatoError:
            continue


def test_a_session_ends_with_a_legato_error():
    """Messages that break the contract end a session, and its caller learns how."""
    chance = random.Random(SEED)
    for _ in range(ANSWERS):
        state = SessionState(4, ())
        try:
            for index in range(9):
                message = filled(session_pb2.SessionResponse(), chance)
                message.index = index
                if index == 0:
                    message.opened.SetInParent()
                state.receive(message)
        except LegatoError:
            continue


class _Failure(grpc.RpcError):
    """A failure with these details."""

    def __init__(self, details):
        self._trailers = (("grpc-status-details-bin", details),)

    def code(self):
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self):
        return None

    def trailing_metadata(self):
        return self._trailers


def test_damaged_details_leave_the_error():
    """The code is kept, with those of the details that can be read."""
    chance = random.Random(SEED)
    for number in range(2000):
        status = status_pb2.Status(code=chance.choice((3, 8, 99, -1)))
        for kind in DETAILS:
            packed = any_pb2.Any()
            packed.Pack(filled(kind(), chance))
            if number % 2:
                packed.value = mutate(packed.value, chance)
            status.details.append(packed)
        error = from_status(status)
        assert isinstance(error, LegatoError)
        assert error.retry_after is None or error.retry_after >= 0
        data = mutate(status.SerializeToString(), chance)
        assert isinstance(from_rpc_error(_Failure(data)), LegatoError)


def test_one_damaged_detail_leaves_the_others():
    """The reason is known although the retry time cannot be read."""
    status = status_pb2.Status(code=8)
    for kind, value in (
        (error_details_pb2.RetryInfo(), b"\xff"),
        (error_details_pb2.ErrorInfo(reason="QUEUE_FULL"), None),
    ):
        packed = any_pb2.Any()
        packed.Pack(kind)
        packed.value = packed.value if value is None else value
        status.details.append(packed)
    error = from_status(status)
    assert (error.reason, error.retry_after) == ("QUEUE_FULL", None)


class _Garbage(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message."""

    def service(self, handler_call_details):
        name = handler_call_details.method.rpartition("/")[2]
        streams_in, streams_out = name in ("PutImage", "Session"), name in ("Generate", "Session")

        def one(received, context):
            return b"\xff\xff"

        def many(received, context):
            yield b"\xff\xff"

        kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
        return getattr(grpc, f"{kind}_rpc_method_handler")(many if streams_out else one)


@pytest.fixture
def garbage():
    """The address of a server that sends only garbage."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Garbage(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0)


TASK = QueryTask("what?")


def test_bytes_that_are_no_message_raise_from_the_blocking_client(garbage):
    """Of calls, uploads, streams and sessions."""
    with Client(garbage) as client:
        for call in (
            lambda: client.query(None, "what?"),
            lambda: client.put_image(image_bytes()),
            lambda: list(client.generate(None, TASK)),
            lambda: client.session([DetectTask("cat")]).__enter__(),
        ):
            with pytest.raises(LegatoError, match="malformed"):
                call()


async def test_bytes_that_are_no_message_raise_from_the_asyncio_client(garbage):
    """The same; gRPC gives asyncio None for them."""
    async with AsyncClient(garbage) as client:

        async def stream():
            return [event async for event in client.generate(None, TASK)]

        async def session():
            async with client.session([DetectTask("cat")]):
                pass

        for call in (
            lambda: client.query(None, "what?"),
            lambda: client.put_image(image_bytes()),
            stream,
            session,
        ):
            with pytest.raises(LegatoError, match="malformed"):
                await asyncio.wait_for(call(), 30)
