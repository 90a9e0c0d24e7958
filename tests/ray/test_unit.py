"""A server that a replica starts, watches and stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_ray import health
from legato_ray.endpoints import EndpointFile
from legato_ray.unit import StartFailed, Unit
from legato_ray.writer import EndpointWriter

from tests.e2e.server import exists, until

HOST = "127.0.0.1"


def unit(*options: str) -> Unit:
    return Unit(options, host=HOST, max_running=4, drain_delay=0.5, drain_grace=5)


@pytest.fixture
def started() -> Iterator[Unit]:
    one = unit("--model", "null")
    try:
        one.wait_until_serving(60)
        yield one
    finally:
        one.kill()


def test_a_unit_from_its_start_to_its_end(started: Unit, tmp_path: Path) -> None:
    """It answers, tells its load, is written for Envoy, and leaves by a drain."""
    with grpc.insecure_channel(started.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert stub.Query(inference_pb2.QueryRequest(question="How many?")).answer
    assert started.is_alive()
    assert started.load().queue_seconds == 0
    assert 0 <= started.load().busy <= 1
    answers = iter([{started.address: started.health_address}])
    writer = EndpointWriter(tmp_path, lambda: next(answers), lame_duck=0)
    for _ in range(2):  # the directory fails the second time, and health decides
        writer.step()
        assert EndpointFile(tmp_path).read() == {started.address}
    started.stop()
    assert not exists(started.pid)
    assert not started.is_alive()
    started.stop()


@pytest.mark.slow
def test_a_hanging_unit_is_not_alive_and_is_killed(started: Unit) -> None:
    """A drain would wait for it in vain."""
    os.kill(started.pid, signal.SIGSTOP)
    assert not started.is_alive()
    started.stop()
    assert not exists(started.pid)


def test_a_unit_leaves_with_its_replica(started: Unit) -> None:
    """The end of the pipe between them drains it, as when Ray kills the replica."""
    assert started._process.stdin is not None
    started._process.stdin.close()
    until(lambda: not health.serves(started.health_address, health.INFERENCE, 1))
    assert exists(started.pid), "it serves on for a while"
    until(lambda: started._process.poll() is not None)
    assert started._process.returncode == 0


def test_a_unit_that_cannot_start_says_so() -> None:
    """With the exit code of the server, whose log has the reason."""
    with pytest.raises(StartFailed, match="ended with"):
        unit("--no-such-option").wait_until_serving(60)
