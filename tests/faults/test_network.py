"""Faults of the network between a client and the server."""

from __future__ import annotations

import collections
import time

import grpc
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc
from legato_client import Client

from tests.e2e.scenes import long_query, long_stream, two_shapes
from tests.e2e.server import SLOWLY, Server, until
from tests.faults.proxy import FaultProxy

SCENE = two_shapes()
DETECT = inference_pb2.DetectRequest(image=SCENE.message(), object="red circle")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of legato-tiny."""
    with Server(tmp_path_factory.mktemp("server"), environment=SLOWLY) as running:
        yield running


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A server whose answers take minutes."""
    options = ("--model", "null", "--null-step-ms", "1000")
    with Server(tmp_path_factory.mktemp("endless"), *options) as running:
        yield running


@pytest.fixture
def proxy(server):
    """Between the tests' clients and the server, without faults yet."""
    with FaultProxy(server.address) as between:
        yield between


@pytest.fixture
def stub(proxy):
    """Without retries."""
    with grpc.insecure_channel(proxy.address, [("grpc.enable_retries", 0)]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def test_delay_changes_no_answer(server, proxy, stub):
    direct = server.inference.Detect(DETECT)
    proxy.delay = 0.05
    start = time.monotonic()
    assert stub.Detect(DETECT).objects == direct.objects
    assert time.monotonic() - start > 0.1, "the proxy did not delay the data"


def test_a_narrow_link_changes_no_answer(server, proxy, stub):
    whole = "".join(_texts(server.inference.Generate(long_stream())))
    proxy.bandwidth = 400_000
    assert "".join(_texts(stub.Generate(long_stream()))) == whole


def test_a_reset_in_the_middle_of_an_answer_frees_its_request(server, proxy, stub):
    stream = stub.Generate(long_stream())
    next(stream)
    until(lambda: server.holds(running=1, waiting=0))
    proxy.reset()
    with pytest.raises(grpc.RpcError) as caught:
        collections.deque(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    server.settle()


def test_a_reset_in_the_middle_of_a_frame_frees_its_request(server, proxy, stub):
    stub.Detect(DETECT)
    proxy.reset_after(400)  # within the stream's first messages
    with pytest.raises(grpc.RpcError) as caught:
        collections.deque(stub.Generate(long_stream()))
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    server.settle()


def test_clients_retry_a_unary_call_after_a_reset(server, proxy):
    with Client(proxy.address) as client:
        expected = client.detect(SCENE.file(), "red circle").objects
        for _ in range(3):
            proxy.reset()
            assert client.detect(SCENE.file(), "red circle").objects == expected


def test_half_open_connections_are_closed_and_their_requests_freed(endless):
    """After the keep-alive's 20 and 5 seconds, whatever the requests' own length."""
    with FaultProxy(endless.address) as proxy, grpc.insecure_channel(proxy.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.Generate(long_stream())
        unary = stub.Query.future(long_query())
        next(stream)
        until(lambda: endless.holds(running=2, waiting=0))
        proxy.freeze()
        endless.settle()  # the test's own timeout bounds it
        proxy.reset()
        for read in (lambda: collections.deque(stream), unary.result):
            with pytest.raises(grpc.RpcError) as caught:
                read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_fresh_connection_is_served_while_another_is_half_open(server, proxy, stub):
    stream = stub.Generate(long_stream())
    next(stream)
    proxy.freeze()
    assert len(server.inference.Detect(DETECT).objects) == 1
    proxy.thaw()
    stream.cancel()
    server.settle()


def _texts(stream):
    for message in stream:
        if message.HasField("text"):
            yield message.text.text
