"""SIGTERM: what runs is finished, what is new is refused, and nothing stays."""

import collections
import functools
import signal
from collections.abc import Callable

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client import Client

from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import Server, exists, failure_of, until
from tests.grammar import check

SCENE = two_shapes()
SLOW = ("--model", "null", "--null-step-ms", "50", "--null-objects", "10000")
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


def test_a_drain_finishes_what_runs(tmp_path):
    """A running stream ends well, a new call gets DRAINING, and the exit code is 0."""
    with Server(tmp_path, "--drain-grace", "60", *SLOW) as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream(max_tokens=150))
        events = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.events("drain_begun"))
        assert not server.is_serving()
        refused = failure_of(lambda: server.inference.Detect(PROBE))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "DRAINING"
        check([*events, *stream], ok=True)
        assert server.process.wait() == 0
        assert not exists(engine)
        assert not server.blobs()
        assert server.events("stopped")


def test_a_drain_cuts_at_its_grace(tmp_path):
    """What the grace does not end is cut with a reason; the exit code is still 0."""
    with Server(tmp_path, "--drain-grace", "0.2", *SLOW) as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream())
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert failure_of(lambda: list(stream)).code is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait() == 0
        assert not exists(engine)


@pytest.mark.parametrize(
    ("ended_by", "processes"),
    [
        ("grace", "2"),
        ("second signal", "1"),
        pytest.param("grace", "1", marks=pytest.mark.slow),
        pytest.param("second signal", "2", marks=pytest.mark.slow),
    ],
)
def test_calls_that_a_drain_cuts_are_told_so(tmp_path, ended_by, processes):
    """Streams and unary calls of every process end with DRAINING and a time to retry after."""
    grace = "0.5" if ended_by == "grace" else "60"
    options = ("--drain-grace", grace, "--processes", processes, "--max-running", "8")
    null = ("--model", "null", "--null-step-ms", "1000", "--null-objects", "10000")
    with Server(tmp_path, *options, *null) as server:
        many = [channel_of(server) for _ in range(8)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(each) for each in many]
        streams = [stub.Generate(long_stream()) for stub in stubs[:4]]
        unary = [stub.Query.future(long_query()) for stub in stubs[4:]]
        for stream in streams:
            next(stream)
        until(lambda: server.holds(running=8, waiting=0))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.events("drain_begun"))
        if ended_by == "second signal":
            server.process.send_signal(signal.SIGTERM)
        reads: list[Callable[[], object]] = [call.result for call in unary]
        reads += [functools.partial(collections.deque, stream) for stream in streams]
        for read in reads:
            failed = failure_of(read)
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "DRAINING"
            assert failed.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert server.process.wait() == (0 if ended_by == "grace" else 128 + signal.SIGTERM)
        for each in many:
            each.close()


def channel_of(server):
    """A connection of its own, which may be to any of the server's processes."""
    return grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),))


def test_a_drain_without_work_is_short(tmp_path):
    """An idle server leaves by itself, whatever its grace, with a client still connected."""
    null = ("--model", "null", "--drain-grace", "3600")
    with Server(tmp_path, *null) as server, Client(server.address) as client:
        client.server_info()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0
