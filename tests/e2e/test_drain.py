"""SIGTERM: what runs is finished, what is new is refused, and nothing stays."""

import signal

import grpc
from legato.v1 import inference_pb2
from legato_client import Client

from tests.e2e.scenes import long_stream, two_shapes
from tests.e2e.server import Server, exists, failure_of, until
from tests.grammar import check

SCENE = two_shapes()
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


def test_a_drain_finishes_what_runs(tmp_path):
    """A running stream ends well, a new call gets DRAINING, and the exit code is 0."""
    with Server(tmp_path, "--drain-grace", "60") as server:
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
    with Server(tmp_path, "--drain-grace", "0.2") as server:
        engine = server.engine_pid
        stream = server.inference.Generate(long_stream())
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert failure_of(lambda: list(stream)).code is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait() == 0
        assert not exists(engine)


def test_a_drain_without_work_is_short(tmp_path):
    """An idle server leaves by itself, whatever its grace, with a client still connected."""
    with Server(tmp_path, "--drain-grace", "3600") as server, Client(server.address) as client:
        client.server_info()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0
