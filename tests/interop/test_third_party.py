"""Other people's clients, as their users install them, in front of real servers.

Those that developers have anyway (openai, moondream, and npm's openai where there is Node) always
run, the others after `make test-clients`. The page docs/http.md lists what is tested here. Home
Assistant and Frigate are not installed: their requests are sent as they make them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.resources
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mcp
import pytest
from legato_client.web.mcp_server import ImageSources
from mcp import StdioServerParameters

from tests.clients.python.web.serving import http_server
from tests.conformance import programs
from tests.e2e.server import Server

ROOT = programs.ROOT
PROGRAM = Path(__file__).with_name("third_party.py")
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
QUESTION = "What is in the picture?"
STREET = str(importlib.resources.files("legato_tiny") / "samples" / "street.jpg")
NOBODY = "nobody looked at this picture"  # what the engine without a model begins to say

pytestmark = pytest.mark.timeout(2 * programs.PATIENCE)

OF_OPENAI: dict[str, tuple[int | str, str]] = {
    "tools": (400, "tools"),
    "embeddings": (404, "Not Found"),
}
REFUSED: dict[str, dict[str, tuple[int | str, str]]] = {
    "openai": {
        **OF_OPENAI,
        "n": (400, "n"),
        "penalties": (400, "frequency_penalty"),
        "URL of an image": (400, "messages[0].content[0].image_url.url"),
        "completions": (404, "Not Found"),
        "tools of a response": (400, "tools"),
        "stored response": (400, "previous_response_id"),
    },
    "openai (npm)": {**OF_OPENAI, "n": (400, "n"), "tools of a response": (400, "tools")},
    "moondream": {},
    "langchain-openai": OF_OPENAI,
    "litellm": OF_OPENAI,
    "tritonclient": {
        "unknown input": ("StatusCode.INVALID_ARGUMENT", "inference input 'picture' for model"),
        "wrong shape": ("StatusCode.INVALID_ARGUMENT", "Expected [1], got [1,1]"),
        "unknown output": ("StatusCode.INVALID_ARGUMENT", "inference output 'mask' for model"),
        "unknown model": ("StatusCode.NOT_FOUND", "this server serves"),
        "sequences": ("StatusCode.INVALID_ARGUMENT", "parameter 'sequence"),
    },
    "Home Assistant": {
        "Assist with control of the house": (400, "tools"),
        "a limit of 3000 tokens": (400, "max_output_tokens"),
        "web search": (400, "tools"),
    },
    "Frigate": {
        "several thumbnails": (400, "messages[0].content[2].image_url.url"),
        "chat with tools": (400, "tools"),
    },
    "llm": {"tools": (400, "tools is not served")},
}
"""Cases that fail, by client, with the status and the parameter or words of the error."""

STRUCTURED = {
    "structured output",
    "structured response",
    "structured AI task",
    "review description",
    "schema",
    "JSON mode",
}
"""Cases that name a format, which the engine without a model refuses."""

SEEN = {
    "image",
    "image alone",
    "query",
    "caption",
    "streamed caption",
    "response about an image",
    "AI task about a camera",
    "object description",
    "prompt about an image",
}
"""Cases whose answer is about the image."""

PACKAGES = {"Home Assistant": "openai", "Frigate": "openai"}
"""Packages that send a client's requests, where they are not called as it is."""


class Target(NamedTuple):
    """A served model, by gRPC and by HTTP."""

    model: str
    address: str
    url: str


@pytest.fixture(scope="module", params=["null", "legato-tiny"])
def target(request, tmp_path_factory):
    """The engine without a model, whose answers are known, and the model that comes along."""
    folder = tmp_path_factory.mktemp("server")
    with (
        Server(folder, "--model", request.param) as server,
        http_server(server.address) as url,
    ):
        yield Target(request.param, server.address, url)
        server.settle()


@functools.cache
def command(client: str) -> list[str]:
    """The program of a client; skips the test where the client is not installed."""
    if client == "openai (npm)":
        try:
            programs.install_node_packages()
        except programs.Missing as error:
            pytest.skip(str(error))
        return ["node", str(programs.NODE / "third_party.mjs")]
    if importlib.util.find_spec(PACKAGES.get(client, client).replace("-", "_")):
        return [sys.executable, str(PROGRAM), client]
    if not CLIENTS_PYTHON.exists():
        pytest.skip(f"needs the package {client}: make test-clients")
    return [str(CLIENTS_PYTHON), str(PROGRAM), client]


def outcomes(client: str, target: Target, folder: Path) -> dict[str, Any]:
    """What became of each case."""
    more = [] if client == "openai (npm)" else [str(folder)]
    address = target.address if client == "tritonclient" else target.url
    done = subprocess.run(
        [*command(client), address, target.model, STREET, *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=programs.PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("client", REFUSED)
def test_clients_of_http(target, client, tmp_path):
    """Everything that the page says works does, and what it says is refused names its parameter."""
    if (client, target.model) == ("Home Assistant", "null"):
        pytest.skip(
            "every answer ends at the token limit, which Home Assistant takes for a failure"
        )
    found = outcomes(client, target, tmp_path)
    if target.model == "null":
        for name in STRUCTURED & found.keys():
            outcome = found.pop(name)
            assert (outcome["status"], "response_format" in outcome["message"]) == (400, True)
    said_to_work, said_to_fail = listed(client)
    refused = REFUSED[client]
    if target.model == "null" and "several thumbnails" in found:  # it takes several images
        check("several thumbnails", found.pop("several thumbnails")["result"], target.model)
        said_to_fail.remove("several thumbnails")
        refused = {name: error for name, error in refused.items() if name != "several thumbnails"}
    works = {name for name, outcome in found.items() if "result" in outcome}
    failed = {name: outcome for name, outcome in found.items() if name not in works}
    assert failed.keys() == refused.keys(), failed
    assert (said_to_work & found.keys(), said_to_fail) == (works, set(failed))
    for name, (status, words) in refused.items():
        outcome = failed[name]
        assert outcome["status"] == status
        assert words == outcome["param"] or words in outcome["message"]
    for name in works:
        check(name, found[name]["result"], target.model)


def check(name: str, result: Any, model: str) -> None:
    """An answer is what the model says; of other results it matters that there are any."""
    if model == "null" and isinstance(result, str) and name not in ("segment", "leaving"):
        assert result.startswith(NOBODY), name
    elif model == "null":
        assert result, name
    elif name in SEEN:
        assert "bus" in result, name
    elif name in ("detect", "point", "boxes"):
        assert len(result) == 1, name


def listed(client: str) -> tuple[set[str], set[str]]:
    """What works and what is refused by the page's table."""
    name = "kserve.md" if client == "tritonclient" else "http.md"
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(client)} \|(.*)\|(.*)\|$", page, re.MULTILINE)
    works, refused = ({each.strip() for each in cell.split(",")} - {"", "nothing"} for cell in row)
    return works, refused


# ---------------------------------------------------------------- gRPC


def ghz(target: Target, call: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ghz's summary of 40 calls; it takes the contract from the server's reflection."""
    path = shutil.which("ghz", path=programs.PATH)
    if path is None:
        pytest.skip("needs ghz: make test-clients")
    options = ["--insecure", "--total", "40", "--concurrency", "4", "--format", "json"]
    options += ["--call", f"legato.v1.InferenceService/{call}", "--data", json.dumps(request)]
    done = subprocess.run(
        [path, *options, target.address],
        capture_output=True,
        text=True,
        check=True,
        timeout=programs.PATIENCE,
    )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.parametrize(
    ("call", "request_", "code"),
    [
        ("Query", {"question": "hello"}, "OK"),
        ("Generate", {"task": {"query": {"question": "hello"}}}, "OK"),
        ("Detect", {"image": {"encoded": {"data": STREET}}, "object": "bus"}, "OK"),
        ("Detect", {"object": "bus"}, "InvalidArgument"),
        ("Query", {"question": "hello", "options": {"model": "none"}}, "NotFound"),
    ],
    ids=["unary", "stream", "image", "no image", "unknown model"],
)
def test_ghz(target, call, request_, code):
    """Every call of the load generator ends with the status that the contract says."""
    if "image" in request_:
        data = base64.b64encode(Path(STREET).read_bytes()).decode()
        request_ = {**request_, "image": {"encoded": {"data": data}}}
    assert ghz(target, call, request_)["statusCodeDistribution"] == {code: 40}


# ---------------------------------------------------------------- MCP


@pytest.mark.parametrize("over", ["standard input", "HTTP"])
async def test_the_model_context_protocol(target, over):
    """The official client finds the bus with each tool, and gets it drawn."""
    if target.model == "null":
        pytest.skip("the answers of the engine without a model are about no image")
    with contextlib.ExitStack() as stack:
        folder = str(Path(STREET).parent)
        command = ["-m", "legato_client.cli", "mcp", "--server", target.address]
        command += ["--allow-path", folder]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        server: Any = StdioServerParameters(command=sys.executable, args=command, env=environment)
        if over == "HTTP":
            sources = ImageSources([folder], [])
            server = stack.enter_context(http_server(target.address, tools=sources)) + "/mcp"
        async with mcp.Client(server, read_timeout_seconds=programs.PATIENCE) as client:
            image = {"image_path": "street.jpg"}
            results = [
                await client.call_tool("detect", {**image, "object": "bus"}),
                await client.call_tool("point", {**image, "object": "bus"}),
                await client.call_tool("segment", {**image, "object": "bus"}),
                await client.call_tool("caption", image),
                await client.call_tool("query", {**image, "question": QUESTION}),
            ]
    assert not any(each.is_error for each in results), results
    found = [each.structured_content for each in results]
    assert len(found[0]["objects"]) == len(found[1]["points"]) == 1
    assert found[2]["path"].startswith("M")
    assert "bus" in found[3]["caption"]
    assert "bus" in found[4]["answer"]
    drawn = [[part.type for part in each.content] for each in results]
    assert drawn == [["text", "image"]] * 3 + [["text"]] * 2
