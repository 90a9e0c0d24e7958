"""Either process is stopped by a signal for a while, as by a debugger, a snapshot or a freezer."""

import os
import signal
import threading
import time

import grpc
import pytest
from legato.v1 import inference_pb2

from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server, exists, failure_of, until

PROBE = inference_pb2.DetectRequest(image=two_shapes().message(), object="red circle")
PAUSES = [2, pytest.param(20, marks=pytest.mark.slow), pytest.param(90, marks=pytest.mark.slow)]


@pytest.fixture
def server(tmp_path):
    """A server of its own."""
    with Server(tmp_path, "--model", "null") as running:
        yield running


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", PAUSES)
def test_a_pause_of_the_service_costs_no_engine(server, seconds):
    """The service does not take its own pause for one of the engine: the same engine serves on."""
    engine = server.engine_pid
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(server.process.pid, signal.SIGCONT)
    until(server.is_serving)
    for _ in range(20):
        assert server.inference.Detect(PROBE).objects
        time.sleep(0.05)
    assert server.engine_pid == engine
    assert not server.events("engine_hung")
    assert not server.events("engine_lost")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_callers_are_refused_while_the_engine_is_paused(tmp_path, processes):
    """Every process refuses at once, and serves when the engine continues."""
    with Server(tmp_path, "--model", "null", "--processes", processes) as server:
        engine = next(pid for pid in server.child_pids() if "core.process" in command(pid))
        os.kill(engine, signal.SIGSTOP)
        until(lambda: len(server.events("engine_hung")) == int(processes))
        for _ in range(5):
            with grpc.insecure_channel(server.address, (("grpc.use_local_subchannel_pool", 1),)):
                refused = failure_of(lambda: server.inference.Detect(PROBE))
                assert refused.code is grpc.StatusCode.UNAVAILABLE
                assert refused.reason == "ENGINE_LOST"
                assert refused.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert not server.is_serving()
        os.kill(engine, signal.SIGCONT)
        until(server.is_serving)
        until(lambda: len(server.events("engine_responds")) == int(processes))
        assert server.inference.Detect(PROBE).objects
        assert not server.events("engine_lost")


def command(pid):
    """The command line of a process."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", [20, 90])
def test_an_engine_that_is_paused_for_long_is_replaced(server, seconds):
    """Another one serves long before the pause ends, and the end of the pause changes nothing."""
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    timer = threading.Timer(seconds, lambda: _continue(engine))
    timer.start()
    until(lambda: server.events("engine_killed"))
    until(server.is_serving)
    assert timer.is_alive()
    assert not exists(engine)
    timer.join()
    assert server.inference.Detect(PROBE).objects
    assert server.engine_pid != engine


def _continue(pid):
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
