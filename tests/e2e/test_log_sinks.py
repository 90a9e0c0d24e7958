"""A log that takes no lines delays no call and ends no process."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc

from tests.e2e.scenes import two_shapes
from tests.e2e.server import ENVIRONMENT, children, exists

REQUEST = inference_pb2.DetectRequest(image=two_shapes().message(), object="red circle")


@contextlib.contextmanager
def full_pipe():
    """The writing end of a full pipe that nothing reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    try:
        yield {"stderr": writing}
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def full_device():
    """A device that refuses every write."""
    with open("/dev/full", "wb") as file:
        yield {"stderr": file}


@contextlib.contextmanager
def closed():
    """No standard error."""
    yield {"preexec_fn": lambda: os.close(2)}


def answered(stub):
    """Whether the server answers; it may be starting."""
    try:
        return len(stub.Detect(REQUEST, timeout=10).objects) > 0
    except grpc.RpcError:
        return False


def free_address():
    """An address of which no log line has to tell, with a port that the kernel gives no other."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        address = ("127.0.0.1", random.randrange(lowest // 2, lowest))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return "{}:{}".format(*address)


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stderr", [full_pipe, pytest.param(full_device, marks=pytest.mark.slow), closed]
)
def test_a_server_whose_log_takes_no_lines_serves_and_drains(stderr, processes):
    """It answers more calls than the log's pipe has lines, and SIGTERM ends it with code 0."""
    address = free_address()
    command = [sys.executable, "-m", "legato_service", "--model", "null", "--listen", address]
    with stderr() as streams:
        process = subprocess.Popen(
            [*command, "--processes", processes],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            **streams,
        )
        try:
            with grpc.insecure_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                while not answered(stub):
                    assert process.poll() is None
                    time.sleep(0.1)
                for _ in range(10):
                    calls = [stub.Detect.future(REQUEST) for _ in range(100)]
                    assert all(call.result().objects for call in calls)
            started = children(process.pid)
            assert started
            process.terminate()
            assert process.wait() == 0
            assert not any(exists(pid) for pid in started)
        finally:
            process.kill()
            process.wait()
