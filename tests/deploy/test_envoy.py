"""Envoy with the shipped configuration: two servers, the ways through it, and TLS on both sides."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from legato.kserve import open_inference_pb2, open_inference_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from legato_client import Client, Finished, ImageNotFound, QueryTask, Unavailable

from tests.deploy.mesh import NULL, Envoy, render, servers, traffic
from tests.e2e.server import Server, until
from tests.service.access.credentials import Authority, Files
from tests.service.harness import image_bytes


def test_envoy_accepts_the_configuration(tmp_path: Path) -> None:
    """The shipped configuration is valid, by Envoy's own word."""
    result = Envoy(tmp_path, "127.0.0.1:1").validate()
    assert result.returncode == 0, result.stderr
    assert "OK" in result.stdout + result.stderr


def test_no_call_fails_when_servers_are_killed_and_stopped(tmp_path: Path) -> None:
    """Calls are answered, streams finish and sessions move while servers come and go."""
    with (
        servers(tmp_path, 3) as (one, other, third),
        Envoy(tmp_path, one.address, other.address) as envoy,
    ):
        with traffic(envoy.address, streams=2) as seen:
            seen.wait_for(50)
            one.process.kill()
            seen.wait_for(50)
            until(lambda: envoy.healthy() == {other.address})
        with traffic(envoy.address, streams=2, sessions=1) as later:
            until(lambda: later.frames)  # its session is with the server that will drain
            envoy.file.write([other.address, third.address])
            until(lambda: envoy.healthy() == {other.address, third.address})
            other.process.send_signal(signal.SIGTERM)
            assert other.process.wait(20) == 0
            envoy.file.write([third.address])
            later.wait_for(50)
        assert seen.failures + later.failures == []
        assert seen.stream_failures + later.stream_failures == []
        assert len(seen.answers | later.answers) == 1, "resumed streams say the same"
        assert later.finished
        assert later.session_failures == []
        assert later.moved == 1, "the session was told to go away once"


@pytest.mark.slow
def test_a_long_request_is_asked_again(tmp_path: Path) -> None:
    """More than a stream's window of 4 MiB, read by a server that is then killed."""
    paced = ("--null-step-ms", "400")  # a call takes 6 s
    with (
        servers(tmp_path, 2, *paced) as both,
        Envoy(tmp_path, *(each.address for each in both)) as envoy,
        Client(envoy.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.query, image_bytes() + bytes(15 << 20), "How many?")
        until(lambda: any(each.load().running for each in both))
        (holder,) = (each for each in both if each.load().running)
        holder.process.kill()
        assert call.result().answer


@pytest.mark.slow
def test_no_call_fails_when_a_server_hangs(tmp_path: Path) -> None:
    """What a stopped process holds is asked again elsewhere, and streams go on there."""
    with servers(tmp_path) as (one, other), Envoy(tmp_path, one.address, other.address) as envoy:
        try:
            with traffic(envoy.address, streams=4) as seen:
                seen.wait_for(50)
                one.process.send_signal(signal.SIGSTOP)
                until(lambda: envoy.healthy() == {other.address})
                seen.wait_for(50)
        finally:
            one.process.send_signal(signal.SIGCONT)
        assert seen.failures + seen.stream_failures == []
        assert seen.slowest > 1, "no call was in the stopped process"
        assert seen.resumed
        assert len(seen.answers) == 1


# ---------------------------------------------------------------- ways through Envoy


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


# ---------------------------------------------------------------- TLS


class Sides:
    """Certificates of clients and of servers, each of an authority of its own."""

    def __init__(self, folder: Path) -> None:
        outside, self._inside = Authority(), Authority()
        self.outside = outside
        self.inside_pem = self._inside.pem
        self.front = Files(_made(folder / "front"), outside.server(), outside.pem)
        self.server = Files(_made(folder / "server"), self._inside.server(), self._inside.pem)
        self.envoy = Files(
            _made(folder / "envoy"), self._inside.client("envoy.internal"), self._inside.pem
        )

    @property
    def options(self) -> list[str]:
        """Of render.py."""
        front, envoy = self.front, self.envoy
        words = ["--tls-cert", front.cert, "--tls-key", front.key, "--client-ca", front.ca]
        words += ["--upstream-ca", envoy.ca, "--upstream-name", "localhost"]
        words += ["--upstream-cert", envoy.cert, "--upstream-key", envoy.key]
        return [str(word) for word in words]

    def start(self, folder: Path) -> Server:
        """A server that asks Envoy for a certificate."""
        files, own = self.server, self.envoy
        tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
        credentials = grpc.ssl_channel_credentials(
            self.inside_pem, own.key.read_bytes(), own.cert.read_bytes()
        )
        folder.mkdir()
        more = [*tls, "--tls-client-ca", str(files.ca)]
        return Server(folder, *NULL, *more, credentials=credentials)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_envoy_accepts_the_configuration_with_tls(tmp_path: Path) -> None:
    """With TLS on both sides and certificates of both."""
    result = Envoy(tmp_path, "127.0.0.1:1", options=Sides(tmp_path).options).validate()
    assert result.returncode == 0, result.stderr


def test_without_the_options_nothing_of_it_counts(tmp_path: Path) -> None:
    """The lines are comments, and half a pair of files is refused."""
    lines = [line.split("#")[0] for line in render(tmp_path).splitlines()]
    assert not any("tls" in line for line in lines)
    with pytest.raises(Exception, match="returned non-zero"):
        render(tmp_path, "--tls-cert", "server.crt")


@pytest.mark.slow
def test_calls_pass_both_sides(tmp_path: Path) -> None:
    """Unary calls and streams, with certificates; without one, or without TLS, none."""
    sides = Sides(tmp_path)
    one, other = (sides.start(tmp_path / name) for name in ("one", "two"))
    client = sides.outside.client("robot-1")
    own: dict[str, Any] = {"ca": sides.outside.pem, "cert": client.chain, "key": client.key}
    with one, other, Envoy(tmp_path, one.address, other.address, options=sides.options) as envoy:
        name = envoy.address.replace("127.0.0.1", "localhost")
        with Client(name, **own) as robot:
            assert robot.query(None, "How many?").answer
            (*_, last) = robot.generate(None, QueryTask("How many?"))
            assert isinstance(last, Finished)
            one.process.kill()
            assert all(robot.query(None, "How many?").answer for _ in range(20))
        strangers: list[dict[str, Any]] = [{"ca": sides.outside.pem}, {}]
        for settings in strangers:
            with Client(name, **settings) as stranger, pytest.raises(Unavailable):
                stranger.query(None, "How many?", timeout=20)
        assert envoy.counter("cluster.legato.ssl.handshake") > 0
