"""Two service processes before one engine that has a model."""

import os
import signal

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client import Client
from legato_engine.ipc import latency_policy

from tests.e2e.jobs import ask, jobs
from tests.e2e.scenes import long_query, two_shapes
from tests.e2e.server import Server, children, failure_of, policies, until

CONNECTIONS = 16  # that all of them go to one of two processes is as good as impossible
SCENE = two_shapes()
PROBE = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A server of two processes; every test leaves it idle."""
    with Server(tmp_path_factory.mktemp("pair"), "--processes", "2") as running:
        yield running
        running.settle()


@pytest.fixture
def inferences(pair):
    """Stubs on connections of their own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    channels = [grpc.insecure_channel(pair.address, options) for _ in range(CONNECTIONS)]
    yield [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    for channel in channels:
        channel.close()


def test_both_processes_answer_alike(pair, alone):
    """Whichever process is asked, the answers are those of a server of one, sampling included."""
    for job, expected in zip(jobs()[:CONNECTIONS], alone, strict=False):
        with Client(pair.address) as client:
            assert ask(client, job) == expected
    pair.settle()


def test_only_the_engine_takes_a_core_from_others(pair):
    """On few cores every thread of the service waits for its turn; none of the engine's does."""
    (follower,) = (each["pid"] for each in pair.events("worker_ready"))
    (engine,) = set(children(pair.process.pid)) - {follower}
    expected = latency_policy.resolve("auto").service_scheduler
    for pid in (pair.process.pid, follower):
        assert policies(pid) == {expected}
    assert policies(engine) == {os.SCHED_OTHER}


def answers(server):
    """The test's own connection may be to a killed process, and breaks at its first call."""
    try:
        return server.is_serving()
    except grpc.RpcError:
        return False


def test_a_killed_process_leaves_nothing(pair, inferences):
    """The engine forgets what a killed process had asked, and another one takes its place."""
    first = pair.events("worker_ready")
    calls = [inference.Query.future(long_query()) for inference in inferences]
    until(lambda: pair.load().running + pair.load().waiting == CONNECTIONS)
    os.kill(first[0]["pid"], signal.SIGKILL)
    until(lambda: any(call.done() for call in calls))
    lost = [call for call in calls if call.done()]
    assert {failure_of(call.result).code for call in lost} == {grpc.StatusCode.UNAVAILABLE}
    for call in calls:
        call.cancel()
    until(lambda: len(pair.events("worker_ready")) > len(first))
    until(lambda: answers(pair))
    pair.settle()
    for inference in inferences:
        assert len(inference.Detect(PROBE, wait_for_ready=True).objects) == 1
    pair.settle()
