"""The ways through Envoy: by affinity, as JSON, as gRPC-Web."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from legato.kserve import open_inference_pb2, open_inference_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from legato_client import Client, ImageNotFound, QueryTask

from tests.deploy.envoy import Envoy
from tests.deploy.servers import servers
from tests.e2e.server import Server
from tests.service.harness import image_bytes


class Mesh(NamedTuple):
    """Envoy and what it stands before."""

    servers: list[Server]
    envoy: Envoy


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    with (
        servers(folder) as running,
        Envoy(folder, *(server.address for server in running)) as envoy,
    ):
        yield Mesh(running, envoy)


def ask(mesh: Mesh, verb: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(mesh.envoy.address, timeout=30)
    try:
        connection.request(verb, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask_json(mesh: Mesh, verb: str, path: str, value: Any = None) -> tuple[int, Any]:
    body = b"" if value is None else json.dumps(value).encode()
    status, text = ask(mesh, verb, path, body, content_type="application/json")
    return status, json.loads(text)


def test_an_upload_and_the_requests_that_name_it_meet(mesh: Mesh) -> None:
    """Whatever server an image is on, requests with its id go there; so does its deletion."""
    with Client(mesh.envoy.address) as client:
        for number in range(16):
            size = (8 + number, 8)
            pixels = np.full((*size, 3), number, np.uint8)
            for image in (image_bytes(size=size), pixels):
                held = client.put_image(image)
                assert client.detect(held, "cup").objects
                assert [*client.generate(held, QueryTask("How many?"))]
                client.delete_image(held)
                with pytest.raises(ImageNotFound):
                    client.detect(held, "cup")
    assert all(_num_calls(server, "PutImage") for server in mesh.servers), "one server has all"


def test_json_is_understood(mesh: Mesh) -> None:
    """The paths of `google.api.http` in the contract answer JSON."""
    data = base64.b64encode(image_bytes()).decode()
    image = {"encoded": {"data": data}}
    status, answer = ask_json(mesh, "POST", "/v1/detect", {"image": image, "object": "cup"})
    assert status == 200
    assert answer["objects"][0]["label"] == "cup"
    status, answer = ask_json(mesh, "GET", "/v1/server")
    assert (status, answer["name"]) == (200, "legato")
    status, answer = ask_json(mesh, "DELETE", "/v1/images/img_nothing")
    assert (status, answer["code"]) == (404, grpc.StatusCode.NOT_FOUND.value[0])
    assert "IMAGE_NOT_FOUND" in [detail.get("reason") for detail in answer["details"]]


def test_a_stream_is_a_line_of_json_for_each_event(mesh: Mesh) -> None:
    """Generate ends with its `finished`."""
    body = json.dumps({"task": {"query": {"question": "How many?"}}}).encode()
    status, text = ask(mesh, "POST", "/v1/generate", body, content_type="application/json")
    events = [json.loads(line) for line in text.splitlines()]
    assert status == 200
    assert "started" in events[0]
    assert "finished" in events[-1]


def test_browsers_are_understood(mesh: Mesh) -> None:
    """A call in gRPC-Web is answered with the message and the status behind it."""
    request = inference_pb2.QueryRequest(question="How many?").SerializeToString()
    status, body = ask(
        mesh,
        "POST",
        "/legato.v1.InferenceService/Query",
        struct.pack(">BI", 0, len(request)) + request,
        content_type="application/grpc-web+proto",
    )
    flags, size = struct.unpack(">BI", body[:5])
    assert (status, flags) == (200, 0)
    assert inference_pb2.QueryResponse.FromString(body[5 : 5 + size]).answer
    assert b"grpc-status:0" in body[5 + size :]


@pytest.mark.parametrize("metadata", [(), (("legato-affinity", "a"),)])
def test_the_open_inference_protocol_passes(mesh: Mesh, metadata: Any) -> None:
    """Its calls are answered, unary ones and the stream, with and without affinity."""
    prompt = struct.pack("<I", 9) + b"How many?"
    request = open_inference_pb2.ModelInferRequest(model_name="", raw_input_contents=[prompt])
    request.inputs.add(name="prompt", datatype="BYTES", shape=[1])
    with grpc.insecure_channel(mesh.envoy.address) as channel:
        stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        ready = stub.ServerReady(open_inference_pb2.ServerReadyRequest(), metadata=metadata)
        assert ready.ready
        assert stub.ModelInfer(request, metadata=metadata).outputs
        assert [*stub.ModelStreamInfer(iter([request]), metadata=metadata)]


def test_the_operators_calls_do_not_pass(mesh: Mesh) -> None:
    """Which server would a Drain reach? None."""
    with grpc.insecure_channel(mesh.envoy.address) as channel:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            admin.Drain(admin_pb2.DrainRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert all(server.is_serving() for server in mesh.servers)


def _num_calls(server: Server, method: str) -> int:
    return sum(method in event["method"] for event in server.events("rpc_ended"))
