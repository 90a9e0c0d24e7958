"""What a client learns of its server, and what an operator asks."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from legato.v1 import admin_pb2, admin_pb2_grpc, server_pb2
from legato_client import (
    AbortCount,
    ClientTooOld,
    ImageInput,
    InvalidArgument,
    Unfinished,
    Unimplemented,
)
from legato_client._grpc.channel import COMMON_REQUEST_BYTES
from legato_client._version import CONTRACT_REVISION
from legato_service import version as real
from PIL import Image

from tests.clients.python.face import Face
from tests.clients.python.fake_server import Failure

# --------------------------------------------------------------- what a client knows of its server

LARGE = bytes(COMMON_REQUEST_BYTES + 1)
SMALL = b"picture"


def info(**fields: Any) -> server_pb2.GetServerInfoResponse:
    """What a server says of itself."""
    return server_pb2.GetServerInfoResponse(name="legato", **fields)


def test_revision():
    """The client and the service of one repository speak the same contract."""
    assert CONTRACT_REVISION == real.CONTRACT_REVISION


def test_a_server_that_moved_on(client, server):
    """A server that needs a newer client is named as such at the first look."""
    server.script["GetServerInfo"].append(info(minimum_client_revision=CONTRACT_REVISION + 1))
    with pytest.raises(ClientTooOld, match="upgrade") as caught:
        client.server_info()
    assert caught.value.metadata["actual"] == str(CONTRACT_REVISION)


def test_large_requests_are_measured(client, server):
    """A request over the server's own limit is refused before it is sent, with both numbers."""
    limits = server_pb2.Limits(max_request_bytes=COMMON_REQUEST_BYTES)
    server.script["GetServerInfo"].append(info(limits=limits))
    with pytest.raises(InvalidArgument) as caught:
        client.detect(LARGE, "cat")
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert caught.value.metadata["limit"] == str(COMMON_REQUEST_BYTES)
    assert int(caught.value.metadata["actual"]) > COMMON_REQUEST_BYTES
    assert server.count("Detect") == 0


@pytest.mark.parametrize("kind", ["file", "path", "array", "Pillow"])
def test_an_image_beyond_a_request_is_refused_with_the_way_around(client, server, tmp_path, kind):
    """Photos of 12 megapixels are, as pixels and as PNG: `put_image` takes them, and is named."""
    limits = server_pb2.Limits(max_request_bytes=COMMON_REQUEST_BYTES)
    server.script["GetServerInfo"].append(info(limits=limits))
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(LARGE)
    images: dict[str, ImageInput] = {
        "file": LARGE, "path": path, "array": noise, "Pillow": Image.fromarray(noise),
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=f"limit is {COMMON_REQUEST_BYTES}.*`put_image`"):
        client.query(images[kind], "What is it?")
    assert server.count("Query") == 0
    held = client.put_image(images[kind])
    assert client.query(held, "What is it?").answer
    assert server.last("Query").image.image_id == held.image_id


def test_small_requests_ask_nothing(client, server):
    """A request that any server takes costs no look at the limits."""
    client.detect(SMALL, "cat")
    assert server.count("GetServerInfo") == 0


def test_a_server_that_says_nothing(client, server):
    """Where there is no GetServerInfo, a large request goes out as it is."""
    server.script["GetServerInfo"].append(Failure(grpc.StatusCode.UNIMPLEMENTED))
    server.script["Detect"].append(Failure(grpc.StatusCode.UNIMPLEMENTED, "reached"))
    with pytest.raises(Unimplemented, match="reached"):
        client.detect(LARGE, "cat")


# ---------------------------------------------------------------- what an operator asks

LOAD = admin_pb2.GetLoadResponse(
    running=2, waiting=3, sessions=1, kv_used_ratio=0.5, engine_state="serving", engine_step=9
)


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.load = LOAD
        self.requests: list[Any] = []

    def GetLoad(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self.load

    def Abort(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return admin_pb2.AbortResponse(aborted=1, already_finished=2)

    def Drain(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return admin_pb2.DrainResponse(running=1, waiting=2, sessions=3)

    def GetMetrics(self, request: Any, context: grpc.ServicerContext) -> Any:
        return admin_pb2.GetMetricsResponse(text=f"# {request.accept}\n")

    def WatchTimeline(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        span = admin_pb2.TimelineSpan(lane="slot 0", name="held", start_ns=5_000_000_000, tokens=6)
        yield admin_pb2.WatchTimelineResponse(spans=[span])
        yield admin_pb2.WatchTimelineResponse(
            decode_steps=admin_pb2.DecodeSteps(steps=3, observed_gain=0.5),
            engine=1,
            engine_started_ns=2_500_000_000,
            lost_launches=4,
            pipeline_depth=2,
            depth_switch=True,
        )

    def SetPipelineDepth(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        return admin_pb2.SetPipelineDepthResponse()


@pytest.fixture
def admin():
    """The fake."""
    return FakeAdmin()


@pytest.fixture(params=["sync", "async"])
def operator(request, admin):
    """Either face, connected to it."""
    running = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield Face(request.param, f"127.0.0.1:{port}", 20.0)
    running.stop(None).wait()


def test_load(operator, admin):
    """The load is typed; what the server did not measure is None."""
    load = operator.load()
    assert (load.running, load.waiting, load.sessions) == (2, 3, 1)
    assert (load.kv_used_ratio, load.engine_state, load.engine_step) == (0.5, "serving", 9)
    assert load.estimated_wait is None
    assert load.decode_steps is None
    wait = duration_pb2.Duration(seconds=2)
    steps = admin_pb2.DecodeSteps(steps=7, step_ms=1.5, predicted_gain=0.25)
    admin.load = admin_pb2.GetLoadResponse(estimated_wait=wait, decode_steps=steps)
    load = operator.load()
    assert load.estimated_wait == 2.0
    assert (load.decode_steps.steps, load.decode_steps.step_ms) == (7, 1.5)
    assert load.decode_steps.predicted_gain == 0.25


def test_abort(operator, admin):
    """A request, a session or everything is stopped; exactly one is named."""
    assert operator.abort(request_id="r") == AbortCount(aborted=1, already_finished=2)
    operator.abort(session_id="s")
    operator.abort(everything=True)
    targets = [request.WhichOneof("target") for request in admin.requests]
    assert targets == ["request_id", "session_id", "all"]
    for wrong in ({}, {"request_id": "r", "everything": True}):
        with pytest.raises(ValueError, match="name either"):
            operator.abort(**wrong)


def test_drain(operator, admin):
    """A drain brings its grace, or none, and says what is left."""
    assert operator.drain(2.5) == Unfinished(running=1, waiting=2, sessions=3)
    operator.drain()
    assert admin.requests[0].grace.ToMilliseconds() == 2500
    assert not admin.requests[1].HasField("grace")


def test_metrics(operator):
    """The text is as the server sent it."""
    assert operator.metrics("text/plain") == "# text/plain\n"


def test_watch_timeline(operator, admin):
    """Updates come one by one, times in seconds."""
    first, second = operator.watch_timeline(2.5)
    assert admin.requests[0].duration.ToMilliseconds() == 2500
    assert (first.spans[0].lane, first.spans[0].start) == ("slot 0", 5.0)
    assert (first.spans[0].tokens, first.decode_steps) == (6, None)
    assert (first.engine_started, first.lost_launches, first.pipeline_depth) == (0, 0, 0)
    assert (second.engine, second.engine_started) == (1, 2.5)
    assert (second.lost_launches, second.pipeline_depth) == (4, 2)
    assert (first.depth_switch, second.depth_switch) == (False, True)
    assert (second.spans, second.decode_steps.observed_gain) == ((), 0.5)


def test_set_pipeline_depth(operator, admin):
    """The depth arrives, and there is nothing to tell."""
    assert operator.set_pipeline_depth(1) is None
    assert admin.requests == [admin_pb2.SetPipelineDepthRequest(depth=1)]
