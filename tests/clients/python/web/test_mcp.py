"""`legato mcp` before the official SDK's client: tools, their refusals, and what may be read."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import json
import os
import sys
import threading
from typing import Any

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2
from legato_client._grpc.channel import MAX_MESSAGE_BYTES
from legato_client.web.listen import Listen
from legato_client.web.mcp_server import PATH, ImageSources
from mcp import Client, MCPError, StdioServerParameters, types
from mcp.client.streamable_http import streamable_http_client
from PIL import Image

from tests.clients.python.fake_server import FakeServer, failure
from tests.clients.python.web.serving import PATIENCE, http_server, send
from tests.service.harness import image_bytes

JPEG = image_bytes("JPEG", (64, 48))
BASE64 = base64.b64encode(JPEG).decode()
ARGUMENTS: dict[str, dict[str, Any]] = {
    "detect": {"object": "cat", "max_objects": 3, "min_confidence": 0.5},
    "point": {"object": "nose"},
    "segment": {"object": "cat"},
    "caption": {"length": "short"},
    "query": {"question": "how many?"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, one of them outside of what is allowed, and ways that lead there."""
    root = tmp_path_factory.mktemp("mcp")
    allowed = root / "allowed"
    (allowed / "yard").mkdir(parents=True)
    (allowed / "yard" / "cat.jpg").write_bytes(JPEG)
    (root / "secret.jpg").write_bytes(JPEG)
    (allowed / "link.jpg").symlink_to(root / "secret.jpg")
    (allowed / "up").symlink_to(root)
    os.mkfifo(allowed / "pipe.jpg")
    with (allowed / "huge.jpg").open("wb") as huge:
        huge.truncate(MAX_MESSAGE_BYTES + 1)
    return allowed


class Images(http.server.ThreadingHTTPServer):
    """A server with the paths that it was asked for."""

    asked: list[str]


class Camera(http.server.BaseHTTPRequestHandler):
    """An image below /yard/, redirections and large bodies beside it."""

    def do_GET(self):
        """Answer by the path."""
        assert isinstance(self.server, Images)
        self.server.asked.append(self.path)
        if self.path == "/yard/moved":
            self.send_response(302)
            self.send_header("location", "/yard/cat.jpg")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(bytes(MAX_MESSAGE_BYTES + 1) if self.path == "/yard/huge" else JPEG)

    def log_message(self, *_):
        """Be silent."""


@pytest.fixture(scope="module")
def camera():
    """A server of images with the paths that it was asked for."""
    with Images(("127.0.0.1", 0), Camera) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(PATIENCE)


@pytest.fixture(scope="module")
def fake():
    with FakeServer() as server:
        server.unrecorded.add("GetServerInfo")
        yield server


@pytest.fixture(autouse=True)
def _fresh(fake):
    fake.requests.clear()
    fake.script.clear()


@pytest.fixture(scope="module")
def url(fake, folder, camera):
    sources = ImageSources([str(folder)], [f"http://127.0.0.1:{camera.server_port}/yard/"])
    with http_server(fake.target, tools=sources) as found:
        yield found + PATH


def stdio(fake, folder):
    """`legato mcp` as a program that a client starts."""
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "legato_client.cli", "mcp", "--server", fake.target],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
    )


@pytest.fixture(params=["http", "stdio", "http of 2025"])
def connected(request, url, fake, folder):
    """The official client over each transport, and with the handshake of earlier revisions."""
    target = stdio(fake, folder) if request.param == "stdio" else url
    mode = "legacy" if request.param == "http of 2025" else "auto"
    return Client(target, mode=mode, read_timeout_seconds=PATIENCE)


def text(result):
    """Return the words of a result."""
    return "".join(each.text for each in result.content if each.type == "text")


async def test_each_tool_answers(connected, fake):
    """The tools are those of the skills, each with a description and schemas of both sides.

    A result has the answer as data and as text, and what has places a drawing of them.
    """
    async with connected as client:
        listed = (await client.list_tools()).tools
        assert {each.name for each in listed} == set(ARGUMENTS)
        for tool in listed:
            assert tool.description
            assert tool.annotations.read_only_hint
            assert tool.input_schema["type"] == tool.output_schema["type"] == "object"
            assert tool.input_schema["additionalProperties"] is False
        for name, more in ARGUMENTS.items():
            result = await client.call_tool(name, {"image_path": "yard/cat.jpg", **more})
            assert not result.is_error, text(result)
            assert json.loads(text(result)) == result.structured_content
            assert fake.last(name.capitalize()).image.encoded.data == JPEG
            drawings = [each for each in result.content if each.type == "image"]
            assert len(drawings) == (name in ("detect", "point", "segment"))
            for each in drawings:
                assert each.mime_type == "image/jpeg"
                with Image.open(io.BytesIO(base64.b64decode(each.data))) as drawn:
                    assert drawn.format == "JPEG"
                    assert drawn.width * 48 == drawn.height * 64
        asked = fake.last("Detect")
        assert (asked.object, asked.max_objects, asked.min_confidence) == ("cat", 3, 0.5)


async def test_no_drawing_and_no_image(url, fake):
    """`annotate: false` returns data alone, and a question needs no image."""
    async with Client(url) as client:
        found = await client.call_tool(
            "detect", {"image_base64": BASE64, "object": "cat", "annotate": False}
        )
        assert [each.type for each in found.content] == ["text"]
        await client.call_tool("query", {"question": "why?"})
        assert not fake.last("Query").HasField("image")


@pytest.mark.parametrize(
    ("tool", "arguments", "field"),
    [
        ("detect", {"image_base64": BASE64}, "object"),
        ("detect", {"image_base64": BASE64, "object": 7}, "object"),
        ("detect", {"image_base64": BASE64, "object": "cat", "max_object": 3}, "max_object"),
        ("detect", {"image_base64": BASE64, "object": "cat", "max_objects": 0}, "max_objects"),
        ("point", {"image_base64": BASE64, "object": "a", "min_confidence": 2}, "min_confidence"),
        ("caption", {"image_base64": BASE64, "length": "endless"}, "length"),
        ("caption", {}, "image_path"),
        ("caption", {"image_path": "cat.jpg", "image_base64": BASE64}, "image_base64"),
        ("caption", {"image_base64": "***"}, "image_base64"),
        ("caption", {"image_base64": "https://a.example/cat.jpg"}, "image_base64"),
    ],
)
async def test_malformed_arguments_name_the_field(url, fake, tool, arguments, field):
    """They are results that a model can read, and reach no server."""
    async with Client(url) as client:
        result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert text(result).startswith(f"invalid_field: {field}: ")
    assert not fake.requests


async def test_failures_of_the_server(url, fake):
    """They tell the reason and the argument, not the contract's field; a bad image says so."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="image", description="no")
    details = error_details_pb2.BadRequest(field_violations=[violation])
    fake.script["Caption"].append(
        failure(grpc.StatusCode.INVALID_ARGUMENT, "IMAGE_UNDECODABLE", details)
    )
    async with Client(url) as client:
        result = await client.call_tool("caption", {"image_base64": BASE64})
        with pytest.raises(MCPError, match="no tool is called 'track'") as caught:
            await client.call_tool("track", {})
    assert text(result).startswith("image_undecodable: image_base64: ")
    assert caught.value.error.code == types.INVALID_PARAMS


@pytest.mark.parametrize(
    "path",
    [
        "../secret.jpg",
        "yard/../../secret.jpg",
        "link.jpg",
        "up/secret.jpg",
        "/etc/passwd",
        "/proc/self/environ",
        "~/secret.jpg",
        "pipe.jpg",
        "yard",
        "no.jpg",
        "cat\0.jpg",
        "huge.jpg",
    ],
)
async def test_paths_that_are_not_read(url, fake, path):
    """Only files below an allowed folder are, wherever links lead, and up to the size limit."""
    async with Client(url) as client:
        result = await client.call_tool("caption", {"image_path": path})
    assert result.is_error
    assert ": image_path: " in text(result)
    assert not fake.requests


async def test_allowed_urls(url, fake, camera):
    """An image below an allowed URL is fetched."""
    async with Client(url) as client:
        at = f"http://127.0.0.1:{camera.server_port}/yard/cat.jpg"
        result = await client.call_tool("caption", {"image_url": at})
    assert not result.is_error, text(result)
    assert fake.last("Caption").image.encoded.data == JPEG


@pytest.mark.parametrize(
    "wrong",
    [
        "http://127.0.0.1:{port}/house/cat.jpg",
        "http://127.0.0.1:{port}/yard/../house/cat.jpg",
        "http://127.0.0.1:{port}/yard/%2e%2e/house/cat.jpg",
        "http://127.0.0.1:{port}/yardarm/cat.jpg",
        "http://127.0.0.1:{port}@a.example/yard/cat.jpg",
        "http://user@127.0.0.1:{port}/yard/cat.jpg",
        "http://127.0.0.1:{port}\\@a.example/yard/cat.jpg",
        "http://localhost:{port}/yard/cat.jpg",
        "http://127.0.0.1:1/yard/cat.jpg",
        "https://127.0.0.1:{port}/yard/cat.jpg",
        "file:///etc/passwd",
        "http://127.0.0.1:{port}/yard/moved",
        "http://127.0.0.1:{port}/yard/huge",
    ],
)
async def test_urls_that_are_not_fetched(url, fake, camera, wrong):
    """Only what lies below an allowed URL is, without redirections, and up to the size limit."""
    camera.asked.clear()
    async with Client(url) as client:
        at = wrong.format(port=camera.server_port)
        result = await client.call_tool("caption", {"image_url": at})
    assert result.is_error
    assert ": image_url: " in text(result)
    assert not fake.requests
    assert set(camera.asked) <= {"/yard/moved", "/yard/huge"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (([], ["cameras.example"]), "--allow-url"),
        (([], ["http:///yard"]), "--allow-url"),
        ((["/no/such/folder"], []), "--allow-path"),
    ],
)
def test_options_that_allow_nothing(options, words):
    with pytest.raises(ValueError, match=words):
        ImageSources(*options)


CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
HEADERS = {
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": "2025-06-18",
}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:6274"}, 200),
        ({"host": "rebound.example"}, 400),
        ({"origin": "http://rebound.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 400),
        ({"authorization": "Basic x"}, 401),
    ],
)
def test_pages_of_others_reach_nothing(url, headers, status):
    """A foreign Host or Origin is refused, so is a body that a form could send."""
    reply = send(url, "POST", PATH, json.dumps(CALL).encode(), {**HEADERS, **headers})
    assert reply.status == status


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[" * 20_000, 413), (json.dumps({"method": 7}).encode(), 400)],
    ids=["no JSON", "many values", "no request"],
)
def test_bodies_that_are_refused(url, fake, body, status):
    """A malformed body, or one of too many values, is an answer and no bug."""
    assert send(url, "POST", PATH, body, HEADERS).status == status
    assert not fake.requests


async def test_each_caller_calls_with_its_own_token(fake, folder):
    """Two callers at once reach the server with their tokens; one without is refused."""
    sources = ImageSources([str(folder)], [])
    listen = Listen("127.0.0.1:0", require_token=True)
    with http_server(fake.target, tools=sources, listen=listen) as found:
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for token in ("one", "two"):
                made = httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"})
                transport = streamable_http_client(
                    found + PATH, http_client=await stack.enter_async_context(made)
                )
                clients.append(await stack.enter_async_context(Client(transport)))
            for client, token in zip(clients * 2, ("one", "two") * 2, strict=True):
                await client.call_tool("query", {"question": "why?"})
                _, _, metadata = fake.requests[-1]
                assert metadata["authorization"] == f"Bearer {token}"
        assert send(found, "POST", PATH, json.dumps(CALL).encode(), HEADERS).status == 401
