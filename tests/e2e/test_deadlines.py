"""Deadlines from a nanosecond to the longest that gRPC's wire format carries."""

import time

import pytest
from legato.v1 import image_pb2, inference_pb2, session_pb2, task_pb2

from tests.e2e.scenes import two_shapes
from tests.e2e.server import TWO_HEARTBEATS, Server
from tests.e2e.wire import RawCall

INFERENCE, IMAGES = "/legato.v1.InferenceService/", "/legato.v1.ImageService/"
SHORT = ["1n", "1u"]
LONG = ["597H", "1193H", "99999999S", "99999999M", "2562048H", "99999999H"]  # over 2^31 ms
A_MONTH = 2_600_000.0  # seconds; a shorter deadline would hide the longer ones from the engine
QUERY = inference_pb2.QueryRequest(question="hello")
OK, DEADLINE_EXCEEDED = b"\x0bgrpc-status\x010", b"\x0bgrpc-status\x014"


def named(request_id):
    """A query whose reply is kept for repeats."""
    request = inference_pb2.QueryRequest(question="hello")
    request.options.request_id = request_id
    return request


def calls(timeout):
    """One call of each kind: its method and messages."""
    tasks = [task_pb2.Task(query=task_pb2.QueryTask(question=text)) for text in ("one", "two")]
    image = two_shapes(offset=sum(timeout.encode()) % 70)  # an image of its own
    upload = image_pb2.PutImageRequest
    return {
        "unary": (INFERENCE + "Query", [QUERY]),
        "unary, named": (INFERENCE + "Query", [named(f"q{timeout}")]),
        "unary, image": (
            INFERENCE + "Detect",
            [inference_pb2.DetectRequest(image=image.message(), object="cat")],
        ),
        "stream": (INFERENCE + "Generate", [inference_pb2.GenerateRequest(task=tasks[0])]),
        "tasks": (INFERENCE + "RunTasks", [inference_pb2.RunTasksRequest(tasks=tasks)]),
        "upload": (
            IMAGES + "PutImage",
            [upload(header=image_pb2.PutImageHeader()), upload(chunk=image.file())],
        ),
        "session": (
            "/legato.v1.SessionService/Session",
            [session_pb2.SessionRequest(open=session_pb2.SessionOpen())],
        ),
    }


@pytest.fixture(
    scope="module", params=[pytest.param("legato-tiny", marks=pytest.mark.slow), "null"]
)
def either(request, tmp_path_factory):
    """A server with a model, and one without."""
    with Server(tmp_path_factory.mktemp("deadlines"), "--model", request.param) as running:
        yield running


def end_of(server, kind, timeout, *, ends=True):
    """All that the server answers to a call of the kind."""
    method, messages = calls(timeout)[kind]
    bodies = [message.SerializeToString() for message in messages]
    raw = RawCall(server.address, method, bodies, {"grpc-timeout": timeout}, ends=ends)
    try:
        return raw.end()
    finally:
        raw.close()


@pytest.mark.parametrize("kind", calls("0"))
def test_a_long_deadline_ends_no_call_and_no_engine(either, kind):
    """Every kind of call takes a deadline months or millennia away, and the engine outlives it."""
    engine = either.engine_pid
    for timeout in LONG:
        assert OK in end_of(either, kind, timeout), timeout
        assert either.inference.Query(QUERY, timeout=A_MONTH).info.model
    time.sleep(TWO_HEARTBEATS)
    assert either.engine_pid == engine
    assert either.is_serving()


@pytest.mark.parametrize("kind", calls("0"))
def test_a_deadline_that_has_passed_ends_at_most_the_call(either, kind):
    """A deadline of a nanosecond is exceeded, or met within gRPC's own millisecond."""
    engine = either.engine_pid
    for timeout in SHORT:
        answer = end_of(either, kind, timeout, ends=kind != "session")
        assert DEADLINE_EXCEEDED in answer or OK in answer, timeout
    assert either.inference.Query(QUERY, timeout=A_MONTH).info.model
    assert either.engine_pid == engine
