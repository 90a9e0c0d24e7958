"""What an operator asks."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from legato.v1 import admin_pb2, admin_pb2_grpc
from legato_client import AbortCount, Unfinished

from tests.clients.python.face import Face

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
